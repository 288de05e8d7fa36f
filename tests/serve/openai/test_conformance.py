"""What schemathesis makes of the description of the API: bodies that fit it and such that do not, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from sgray.config import Config
from sgray.serve.openai.app import ROUTES, create_app
from sgray.serve.openai.openapi import document

MODEL = Config().model_name
KEY = {"x-api-key": "boss"}
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def cases() -> list[tuple[str, str, GenerationMode]]:
    """Every operation with good calls, and with wrong ones where something of it can be wrong."""
    found = []
    for path, methods in document(ROUTES)["paths"].items():
        for method, operation in methods.items():
            found.append((method, path, GenerationMode.POSITIVE))
            if "requestBody" in operation or any(one["in"] == "query" for one in operation.get("parameters", [])):
                found.append((method, path, GenerationMode.NEGATIVE))
    return found


def narrowed(*, is_short: bool) -> dict[str, Any]:
    """The description for calls of the model that is there; with `is_short`, of few tokens. Keys are the test's."""
    described = document(ROUTES)
    limits = (
        {"max_tokens": 3, "max_completion_tokens": 3, "max_new_tokens": 3, "n": 2, "priority": 9} if is_short else {}
    )
    for schema in described["components"]["schemas"].values():
        fields = schema.get("properties", {})
        if schema.get("additionalProperties") is False and "model" in fields and "object" not in fields:
            fields["model"] = {"const": MODEL}
        for name, most in limits.items():
            if name in fields and schema["title"].endswith(("Body", "Sampling")):
                fields[name] = {"type": "integer", "minimum": 1, "maximum": most}
    for methods in described["paths"].values():
        for operation in methods.values():
            del operation["security"]
    return described


@pytest.fixture(scope="module")
def checks() -> list[Any]:
    load_all_checks()
    return CHECKS.get_by_names(CHECKED)


@pytest.fixture(scope="module")
def schemas(tiny_backend, tokenizer, tmp_path_factory) -> dict[GenerationMode, Any]:
    directory = tmp_path_factory.mktemp("keys")
    (directory / "keys").write_text("boss\n")
    api = {"admin_keys_file": str(directory / "keys"), "tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    app = create_app(Config.parse({"api": api}), tokenizer, tiny_backend)
    schemas = {}
    for mode in GenerationMode:
        schemas[mode] = schemathesis.openapi.from_dict(narrowed(is_short=mode is GenerationMode.POSITIVE))
        schemas[mode].app = app
    return schemas


@pytest.mark.parametrize(("method", "path", "mode"), cases())
def test_calls_are_answered_as_described(schemas, checks, method, path, mode):
    operation = schemas[mode][path][method.upper()]
    has_body = "requestBody" in operation.definition.raw
    statuses: set[int] = set()

    @settings(max_examples=20 if has_body else 4, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(mode))
    def check(case: Any) -> None:
        statuses.add(case.call_and_validate(headers=KEY, checks=checks).status_code)

    check()
    assert mode is GenerationMode.NEGATIVE or path == "/v1/models/{name}" or 200 in statuses
