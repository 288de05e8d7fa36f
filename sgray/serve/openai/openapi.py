"""The API's description in OpenAPI 3.1, made from the table of routes, the descriptions of handlers and their types.

It knows no service and no HTTP: tables in, a JSON object out. A route without a description is there all the same, with
its method, its path and its errors; a test asks for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

import sgray
from sgray import errors
from sgray.serve.anthropic import errors as anthropic
from sgray.serve.anthropic.answer_shapes import AnthropicError
from sgray.serve.openai.answer_shapes import ErrorAnswer
from sgray.serve.openai.keys import OPEN_PATHS
from sgray.serve.openai.operations import OPERATIONS, REFUSED, Entry, Operation
from sgray.serve.openai.validate import Unsupported

Json = dict[str, Any]
Error = type[errors.SgrayError]

ERRORS: tuple[Error, ...] = (
    errors.InvalidRequestError,
    errors.InvalidKeyError,
    errors.AdminKeyRequiredError,
    errors.NotFoundError,
    errors.RequestTimeoutError,
    errors.RequestTooLargeError,
    errors.UrlTooLongError,
    errors.HeadersTooLargeError,
    errors.SgrayError,
    errors.OverloadedError,
)
"""One for each status; others that share it differ in their code."""

REFUSED_OTHERWISE = "Refused with another value:"
"""How the description of a field begins that is there for the values that ask for nothing."""

EVENT_STREAM = "text/event-stream"

_REF = "#/components/schemas/{model}"
_ANTHROPIC = "Anthropic"
_CALLER: list[Json] = [{"bearer": []}, {"header": []}]
_ADMIN: list[Json] = [{"adminBearer": []}, {"adminHeader": []}]
_ABOUT = (
    "OpenAI's API and Anthropic's messages, with the native and utility routes of SGLang. A server without keys is "
    "open to all; one with keys asks for one on every route but those that a load balancer asks. Every answer has an "
    "`x-request-id`: the caller's own, where it sent a sane one. In bodies, a field that is null counts as left out."
)


def document(entries: Sequence[Entry]) -> Json:
    """The description of the routes."""
    schemas = _Schemas([OPERATIONS[entry.name] for entry in entries if entry.name in OPERATIONS])
    paths: dict[str, Json] = {}
    for entry in entries:
        for method in entry.methods:
            paths.setdefault(_template(entry.path), {})[method.lower()] = _operation(entry, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sgray", "version": sgray.__version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas.named,
            "responses": _error_responses(schemas),
            "headers": {"RequestId": {"description": "The call's name in logs.", "schema": {"type": "string"}}},
            "securitySchemes": _security_schemes(),
        },
    }


class _Untitled(GenerateJsonSchema):
    """Schemas without titles that only repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Called by pydantic for each field."""
        return False


class _Schemas:
    """The schemas of all types: those of models by name, and how to point at them."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        shapes: dict[str, Any] = {repr(shape): shape for shape in (ErrorAnswer, AnthropicError)}
        for operation in operations:
            for shape in (operation.body, operation.answer, operation.event):
                if shape is not None and not isinstance(shape, str):
                    shapes[repr(shape)] = shape
        given: list[tuple[str, Literal["validation"], TypeAdapter[Any]]] = [
            (key, "validation", TypeAdapter(shape)) for key, shape in shapes.items()
        ]
        found, rest = TypeAdapter.json_schemas(given, ref_template=_REF, schema_generator=_Untitled)
        self._of = {key: schema for (key, _), schema in found.items()}
        self.named: dict[str, Json] = rest["$defs"]
        for body in {operation.body for operation in operations if operation.body} | set(REFUSED):
            if body.__name__ in self.named:
                self.named[body.__name__] = _as_read(self.named[body.__name__], REFUSED.get(body, {}))

    def of(self, shape: Any) -> Json:
        """The schema of a type, which for a model is a reference."""
        return self._of[repr(shape)]


def _as_read(schema: Json, refused: Unsupported) -> Json:
    """A body's schema with what its reader does: null is left out, and harmless values of refused fields are good."""
    required = schema.get("required", [])
    fields = {name: one if name in required else _or_null(one) for name, one in schema["properties"].items()}
    for name, (harmless, reason) in refused.items():
        fields.setdefault(name, {"enum": [None, *harmless], "description": f"{REFUSED_OTHERWISE} {reason}."})
    return schema | {"properties": fields}


def _or_null(schema: Json) -> Json:
    """The schema of something that may also be null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema and "const" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    about = {name: one for name, one in schema.items() if name in ("description", "default")}
    rest = {name: one for name, one in schema.items() if name not in about}
    options = [one for one in rest.get("anyOf", [rest]) if one != {"type": "null"}]
    return {"anyOf": [*options, {"type": "null"}]} | about


def _operation(entry: Entry, method: str, schemas: _Schemas) -> Json:
    about = OPERATIONS.get(entry.name, Operation(entry.name))
    found: Json = {"operationId": _identity(entry, method), "summary": about.title}
    if about.text:
        found["description"] = about.text
    parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)", entry.path)] + list(about.parameters)
    if parameters:
        found["parameters"] = parameters
    if about.body is not None and method != "GET":
        found["requestBody"] = {"required": True, "content": {about.body_kind: {"schema": schemas.of(about.body)}}}
    found["responses"] = {"200": _answer(about, schemas)} | _refusals(entry, about)
    found["security"] = [] if entry.path in OPEN_PATHS else _ADMIN if entry.is_admin else _CALLER
    return found


def _answer(about: Operation, schemas: _Schemas) -> Json:
    """The good answer: JSON, another media type, or nothing; and the events of a stream."""
    if isinstance(about.answer, str):
        content = {about.answer: {"schema": {"type": "string"}}}
    else:
        content = {} if about.answer is None else _content(schemas.of(about.answer))
    if about.event is not None:
        content[EVENT_STREAM] = {"schema": _event(schemas.of(about.event), about.has_named_events)}
    return _response("The answer.", content)


def _event(schema: Json, is_named: bool) -> Json:
    """One event of a stream; its data is a text, which holds JSON."""
    data: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    end = {"const": "[DONE]", "description": "The end."}
    return {
        "type": "object",
        "description": "An event. Where one holds an error, it is the last.",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [data] if is_named else [data, end]}},
        "required": ["event", "data"] if is_named else ["data"],
    }


def _refusals(entry: Entry, about: Operation) -> Json:
    """The errors by their status."""
    kinds: list[Error] = [errors.UrlTooLongError, errors.HeadersTooLargeError, errors.SgrayError]
    if about.body is not None or about.parameters or about.may_be_missing:
        kinds.append(errors.InvalidRequestError)
    if about.body is not None:
        kinds.append(errors.RequestTooLargeError)
    if entry.path not in OPEN_PATHS:
        kinds.append(errors.InvalidKeyError)
    if entry.is_admin or about.has_admin_part:
        kinds.append(errors.AdminKeyRequiredError)
    if about.names_model or about.may_be_missing:
        kinds.append(errors.NotFoundError)
    if about.waits:
        kinds += [errors.RequestTimeoutError, errors.OverloadedError]
    prefix = _ANTHROPIC if anthropic.is_anthropic(entry.path) else ""
    found = {_status(kind, prefix): {"$ref": f"#/components/responses/{prefix}{kind.__name__}"} for kind in kinds}
    return dict(sorted(found.items()))


def _error_responses(schemas: _Schemas) -> Json:
    """An answer for each status that an error has, in both shapes."""
    shapes = {"": ErrorAnswer, _ANTHROPIC: AnthropicError}
    return {
        f"{prefix}{kind.__name__}": _response(_first_line(kind), _content(schemas.of(shape)))
        for prefix, shape in shapes.items()
        for kind in ERRORS
    }


def _status(kind: Error, prefix: str) -> str:
    """The status of an error, which one API may have of its own."""
    return str(anthropic.error_answer(kind(""), "")[0] if prefix else kind.status)


def _response(text: str, content: Json) -> Json:
    header = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    return {"description": text, "headers": header} | ({"content": content} if content else {})


def _content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _first_line(kind: Error) -> str:
    if kind is errors.SgrayError:
        return "A fault of the server; its log has the details under the request id."
    assert kind.__doc__ is not None
    return kind.__doc__.partition("\n")[0]


def _template(path: str) -> str:
    """OpenAPI's form of a path: without the kind of a parameter."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _identity(entry: Entry, method: str) -> str:
    """A name for generated clients, one for each path and method."""
    return "_".join([method.lower(), *re.findall(r"\w+", _template(entry.path))])


def _security_schemes() -> Json:
    schemes: Json = {}
    for name, text in (("", "A caller's key, or an operator's."), ("admin", "An operator's key.")):
        bearer, header = (f"{name}Bearer", f"{name}Header") if name else ("bearer", "header")
        schemes[bearer] = {"type": "http", "scheme": "bearer", "description": text}
        schemes[header] = {"type": "apiKey", "in": "header", "name": "x-api-key", "description": text}
    return schemes
