"""Every route of the HTTP application is described, in its schema and on its page."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from sgray.cli import main
from sgray.serve.openai.app import ROUTES
from sgray.serve.openai.openapi import ERRORS, document
from sgray.serve.openai.operations import OPERATIONS, Entry

PAGE = Path(__file__).parents[2] / "docs/api.md"
WITHOUT_BODY = {"flush_cache", "cancel_batch"}


@pytest.mark.parametrize("entry", ROUTES, ids=lambda entry: entry.path)
def test_every_route_is_described(entry: Entry) -> None:
    about = OPERATIONS[entry.name]
    if "POST" in entry.methods and entry.name not in WITHOUT_BODY:
        assert about.body is not None
    if about.body is not None and "stream" in about.body.model_fields:
        assert about.event is not None


def test_no_description_is_of_a_route_that_is_gone() -> None:
    assert set(OPERATIONS) == {entry.name for entry in ROUTES}


def test_every_status_of_an_error_has_one_text() -> None:
    statuses = [kind.status for kind in ERRORS]
    assert len(set(statuses)) == len(statuses)


def test_the_schemas_are_schemas_and_point_at_what_is_there() -> None:
    described = document(ROUTES)
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in references(described):
        target = described
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_a_route_without_a_description_is_in_the_schema_all_the_same() -> None:
    async def fresh(calls: object, request: object) -> None: ...

    described = document([Entry("GET, PUT", "/fresh/{name:path}", fresh, is_admin=True)])
    assert set(described["paths"]["/fresh/{name}"]) == {"get", "put"}
    assert described["paths"]["/fresh/{name}"]["put"]["security"] == [{"adminBearer": []}, {"adminHeader": []}]


def test_the_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "api"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "write it again: sgray config api > docs/api.md"
