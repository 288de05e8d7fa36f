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
NAMES_A_FILE = {("post", "/v1/batches")}  # and files have names that nobody guesses
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


LIMITS = {"max_tokens": 3, "max_output_tokens": 3, "max_new_tokens": 3, "n": 2, "priority": 9}
DEPENDENT = {
    *("stream_options", "continue_final_message", "add_generation_prompt", "top_logprobs", "max_completion_tokens"),
    *("min_tokens", "min_new_tokens", "best_of", "input_ids", "rid", "logprob_start_len", "logit_bias", "tools"),
    *("stop_token_ids", "chat_template_kwargs", "separate_reasoning", "thinking", "output_config", "tool_choice"),
    *("reasoning", "text", "include", "cache_control", "system", "token_ids_logprob", "response_format", "regex"),
    *("ebnf", "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "reasoning_effort", "verbosity"),
}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "system"]}, "content": {"type": "string", "minLength": 1}},
    "required": ["role", "content"],
    "additionalProperties": False,
}

ONE_PROMPT = {
    "text": {"type": "string", "minLength": 1},
    "sampling_params": {"$ref": "#/components/schemas/NativeSampling"},
    "return_logprob": {"type": "boolean"},
    "top_logprobs_num": {"type": "integer", "minimum": 0, "maximum": 20},
}


def narrowed(*, is_good: bool) -> dict[str, Any]:
    """The description for calls of the model that is there. Keys are the test's.

    With `is_good` calls are short, and without fields that are right or wrong only beside others.
    """
    described = document(ROUTES)
    schemas = described["components"]["schemas"]
    for schema in [one for one in schemas.values() if one["title"].endswith(("Body", "Sampling"))]:
        fields = schema["properties"]
        if "model" in fields:
            fields["model"] = {"enum": [MODEL] if "model" in schema.get("required", []) else [MODEL, None]}
        if is_good:
            limits = {name: {"type": "integer", "minimum": 1, "maximum": most} for name, most in LIMITS.items()}
            required = schema.get("required", [])
            kept = {name: one for name, one in fields.items() if name in required or name not in DEPENDENT}
            schema["properties"] = kept | {name: one for name, one in limits.items() if name in fields}
    if is_good:
        schemas["Message"] = MESSAGE
        for name in ("MessagesBody", "PromptBody"):
            schemas[name]["properties"]["messages"] = {"type": "array", "items": MESSAGE, "minItems": 1}
        schemas["ResponsesBody"]["properties"]["input"] = MESSAGE["properties"]["content"]
        schemas["ResponsesBody"]["required"] = ["model", "input"]
        schemas["ResponsesBody"]["properties"]["n"] = {"const": 1}
        schemas["NativeSampling"]["required"] = ["max_new_tokens"]  # without it more than this model's context
        schemas["NativeBody"] |= {
            "required": list(ONE_PROMPT)[:2],
            "properties": schemas["NativeBody"]["properties"] | ONE_PROMPT,
        }
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
    batches = {"batches_dir": str(directory / "batches")}
    app = create_app(Config.parse({"api": api, "batches": batches}), tokenizer, tiny_backend)
    schemas = {}
    for mode in GenerationMode:
        schemas[mode] = schemathesis.openapi.from_dict(narrowed(is_good=mode is GenerationMode.POSITIVE))
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
    assert mode is GenerationMode.NEGATIVE or "{" in path or (method, path) in NAMES_A_FILE or 200 in statuses
