"""The page of the HTTP API in Markdown, written from its OpenAPI description and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sgray.serve.openai.openapi import EVENT_STREAM, REFUSED_OTHERWISE

Json = dict[str, Any]

_HEAD = """# The HTTP API

<!-- Written by `sgray config api`; do not edit. -->

{about}

The same as OpenAPI 3.1: `GET /openapi.json` of a server, or `sgray config api --json`.

An answer that is no success is `{{"error": {{"message", "type", "param", "code"}}}}`, with these statuses:

{errors}
"""
_KEYS = {"bearer": "a key", "adminBearer": "an operator's key"}


def page(document: Json) -> str:
    """The whole page."""
    components = document["components"]
    errors = _error_table(document)
    parts = [_HEAD.format(about=document["info"]["description"], errors=errors)]
    parts += [_section(paths, operation, components) for paths, operation in _operations(document)]
    bodies = {_name_of(content) for _, one in _operations(document) for content in _contents(one)}
    rest = [name for name in components["schemas"] if name not in bodies and not name.startswith("Error")]
    parts.append("## Objects inside\n")
    parts += [_object(name, components["schemas"][name]) for name in sorted(rest)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _operations(document: Json) -> list[tuple[list[str], Json]]:
    """The operations, each once with all its names ("POST /path")."""
    found: dict[str, tuple[list[str], Json]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names, _ = found.setdefault(operation["summary"], ([], operation))
            names.append(f"{method.upper()} {path}")
            if "requestBody" in operation:
                found[operation["summary"]] = (names, operation)
    return list(found.values())


def _error_table(document: Json) -> str:
    statuses: dict[str, str] = {}
    for _, operation in _operations(document):
        for status, response in operation["responses"].items():
            if "$ref" in response:
                statuses.setdefault(status, response["$ref"].rpartition("/")[2])
    texts = document["components"]["responses"]
    return _table(
        ("status", "when"), [(status, texts[name]["description"]) for status, name in sorted(statuses.items())]
    )


def _section(paths: list[str], operation: Json, components: Json) -> str:
    names = ", ".join(f"`{path}`" for path in paths)
    lines = [f"## {operation['summary']}\n", f"{names}. {_needs(operation)}"]
    if "description" in operation:
        lines[-1] += f" {operation['description']}"
    for parameter in operation.get("parameters", []):
        text = parameter.get("description", "Part of the path.")
        lines.append(f"\n`{parameter['name']}` ({parameter['in']}): {text}")
    if body := operation.get("requestBody"):
        (kind, content), *_ = body["content"].items()
        title = "Body" if kind == "application/json" else f"Body, as {kind}"
        lines.append(f"\n{_fields(title, _schema(content, components))}")
    for kind, content in operation["responses"]["200"].get("content", {}).items():
        lines.append(f"\n{_answer(kind, content, components)}")
    statuses = ", ".join(status for status, one in operation["responses"].items() if "$ref" in one)
    lines.append(f"\nErrors: {statuses}.\n")
    return "\n".join(lines)


def _needs(operation: Json) -> str:
    for requirement in operation["security"]:
        for scheme in requirement:
            return f"Needs {_KEYS[scheme]}, where the server has keys."
    return "Needs no key."


def _answer(kind: str, content: Json, components: Json) -> str:
    if kind == EVENT_STREAM:
        is_named = "event" in content["schema"]["required"]
        end = "events named by their type" if is_named else "events, the last with the data `[DONE]`"
        text = f"With `stream`: `{kind}`, {end}; an error may end it. The data of an event"
        return _answer_fields(text, _resolved(event_data(content), components))
    if kind != "application/json":
        return f"Answer: `{kind}`."
    return _answer_fields("Answer", _schema(content, components))


def _schema(content: Json, components: Json) -> Json:
    return _resolved(content["schema"], components)


def _resolved(schema: Json, components: Json) -> Json:
    """The schema behind a reference; of a choice, the first."""
    while "$ref" in schema or "anyOf" in schema:
        schema = components["schemas"][_name(schema["$ref"])] if "$ref" in schema else schema["anyOf"][0]
    return schema


def _object(name: str, schema: Json) -> str:
    return f"### {name}\n\n{_fields(schema.get('description', name), schema)}\n"


def _answer_fields(title: str, schema: Json) -> str:
    """The same for an answer, which has no defaults."""
    rows = [(f"`{name}`", _type(one) + _or_null(one), _text(one)) for name, one in schema.get("properties", {}).items()]
    return f"{title}:\n\n{_table(('field', 'type', ''), rows)}" if rows else f"{title}: a JSON object."


def _fields(title: str, schema: Json) -> str:
    """The title and a table of an object's fields."""
    required = schema.get("required", [])
    fields = schema.get("properties", {})
    plain = {name: one for name, one in fields.items() if not _is_refused(one)}
    rows = [
        (
            f"`{name}`",
            _type(one) + (_or_null(one) if name in required else ""),
            _default(name, one, required),
            _text(one),
        )
        for name, one in plain.items()
    ]
    refused = ", ".join(f"`{name}`" for name in fields if name not in plain)
    note = f"\n\nRefused unless they ask for nothing: {refused}." if refused else ""
    head = f"{title.rstrip('.')}:"
    return f"{head}\n\n{_table(('field', 'type', 'default', ''), rows)}{note}" if rows else f"{head} a JSON object."


def _is_refused(schema: Json) -> bool:
    return str(schema.get("description", "")).startswith(REFUSED_OTHERWISE)


def _default(name: str, schema: Json, required: list[str]) -> str:
    if name in required:
        return "required"
    value = schema.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def _text(schema: Json) -> str:
    """What the field is, and its bounds."""
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    ranges = {**{key: one[key] for one in schema.get("anyOf", []) for key in bounds if key in one}, **schema}
    limits = ", ".join(f"{sign} {ranges[key]}" for key, sign in bounds.items() if key in ranges)
    return " ".join(part for part in (schema.get("description", ""), f"({limits})" if limits else "") if part)


def _type(schema: Json) -> str:
    """A type in words, without null: of a body, every field that is not required may be null."""
    if "$ref" in schema:
        return f"[{_name(schema['$ref'])}](#{_name(schema['$ref']).lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kinds = schema.get("type", "anything")
    kind = next(one for one in kinds if one != "null") if isinstance(kinds, list) else kinds
    if kind == "array":
        inner = schema.get("items")
        return f"array of {_type(inner)}" if inner else "array"
    return str(kind)


def _or_null(schema: Json) -> str:
    return " or null" if {"type": "null"} in schema.get("anyOf", []) and len(schema["anyOf"]) > 1 else ""


def event_data(content: Json) -> Json:
    """The schema of the JSON in the events of a stream."""
    data: Json = content["schema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
    return data


def _contents(operation: Json) -> list[Json]:
    """The schemas that an operation's own section shows."""
    answer = operation["responses"]["200"].get("content", {})
    found = [event_data(one) if kind == EVENT_STREAM else one["schema"] for kind, one in answer.items()]
    body = operation.get("requestBody")
    return found + ([one["schema"] for one in body["content"].values()] if body else [])


def _name_of(schema: Json) -> str:
    while "anyOf" in schema:
        schema = schema["anyOf"][0]
    return _name(schema.get("$ref", ""))


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("-" * max(1, len(name)) for name in head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )
