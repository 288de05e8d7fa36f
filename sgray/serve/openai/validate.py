"""From a JSON value to a checked body, and from a failed check to an error that a client understands."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from sgray.errors import InvalidRequestError

BodyT = TypeVar("BodyT", bound=BaseModel)
Unsupported = Mapping[str, tuple[tuple[object, ...], str]]

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
_BOUND = {
    "greater_than_equal": ("ge", "is below the minimum of"),
    "greater_than": ("gt", "must be above"),
    "less_than_equal": ("le", "is above the maximum of"),
    "less_than": ("lt", "must be below"),
}
_SHOWN_CHARS = 80


def parse_json(raw: bytes, max_depth: int) -> Any:
    """A JSON text as Python values, arrays and objects in at most `max_depth` levels.

    NaN and infinities, which Python's parser lets through, come out as floats, so that the check of the field they
    stand in can name it.
    """
    if not raw.strip():
        raise InvalidRequestError("The request has no body; send a JSON object.")
    try:
        value = json.loads(raw)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > max_depth and _is_deeper(value, max_depth):  # what few signs cannot be
        raise _too_deep(max_depth)
    return value


def parse_body(model: type[BodyT], body: object, *, within: str = "") -> BodyT:
    """`body` checked against `model`; a null field counts as left out. Raises InvalidRequestError naming the field.

    `within` is where the object stands in the body, for errors: a field, or a field and an index.
    """
    if not isinstance(body, Mapping) and within:
        wrong_type(within.partition("[")[0], within, "an object", body)
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"The body must be a JSON object, but it is {kind(body)}.")
    given = {str(name): value for name, value in body.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _explain(model, dict(error.errors(include_url=False)[0]), within) from None


def without_unsupported(body: object, table: Unsupported, *, within: str = "") -> object:
    """The body without the fields that ask for nothing; raises for those that ask for what is not there."""
    if not isinstance(body, Mapping):
        return body
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name not in table:
            kept[name] = value
            continue
        harmless, reason = table[name]
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            place = f"{within}.{name}" if within else name
            message = f"'{place}' is not supported: {reason}."
            raise InvalidRequestError(message, param=place, code="unsupported_parameter")
    return kept


def kind(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def shown(value: object) -> str:
    """A value as it may appear in a message: short, printable."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def wrong_type(param: str, place: str, expected: str, value: object) -> NoReturn:
    """Raise: the value at `place` (inside field `param`) is not of the expected type."""
    message = f"Invalid type for '{place}': expected {expected}, but got {kind(value)} instead."
    raise InvalidRequestError(message, param=param, code="invalid_type")


def wrong_value(param: str, place: str, reason: str) -> NoReturn:
    """Raise: the value at `place` (inside field `param`) is of the right type but not allowed."""
    raise InvalidRequestError(f"Invalid value for '{place}': {reason}", param=param, code="invalid_value")


def missing(param: str, place: str) -> NoReturn:
    """Raise: nothing stands at `place` (inside field `param`), and something must."""
    message = f"Missing required parameter: '{place}'."
    raise InvalidRequestError(message, param=param, code="missing_required_parameter")


def checked_text(param: str, place: str, value: object) -> str:
    """`value` as a string that can be encoded: a lone surrogate (JSON's \\ud800) has no UTF-8 form."""
    if not isinstance(value, str):
        wrong_type(param, place, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        wrong_value(param, place, f"character {error.start} is half of a surrogate pair, which is not text.")
    return value


def check_texts(param: str, place: str, value: object) -> None:
    """Raise where a string anywhere in a JSON value cannot be encoded: for what is sent back as it came."""
    if isinstance(value, str):
        checked_text(param, place, value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            checked_text(param, place, name)
            check_texts(param, f"{place}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_texts(param, f"{place}[{index}]", inner)


def unknown_name(param: str, place: str, allowed: list[str]) -> InvalidRequestError:
    """The error for a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(place.rsplit(".", 1)[-1], allowed, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    message = f"Unrecognized request argument supplied: {shown(place)[1:-1]}.{hint}"
    return InvalidRequestError(message, param=param, code="unknown_parameter")


def _is_deeper(value: object, max_depth: int) -> bool:
    """Whether arrays and objects lie in each other in more than `max_depth` levels."""
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        level = [item for item in level if isinstance(item, list | dict)]
        if not level:
            return False
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def _too_deep(max_depth: int) -> InvalidRequestError:
    message = f"The body is nested too deeply: arrays and objects in at most {max_depth} levels are accepted."
    return InvalidRequestError(message, code="invalid_value")


def _explain(model: type[BaseModel], item: dict[str, Any], within: str) -> InvalidRequestError:
    """One failed check in words; `param` is the dotted path up to the first array index."""
    names = [part for part in item["loc"] if isinstance(part, str)]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
    param = ".".join(names)
    if within:
        place = f"{within}.{place}"
        param = within.partition("[")[0] if "[" in within else f"{within}.{param}"
    code, context, value = item["type"], item.get("ctx", {}), item["input"]
    try:
        if code == "missing":
            missing(param, place)
        if code == "extra_forbidden":
            return unknown_name(param, place, _fields(model, names[:-1]))
        if code in _EXPECTED:
            wrong_type(param, place, _EXPECTED[code], value)
        if code == "finite_number":
            wrong_value(param, place, f"{value} is not a finite number.")
        if code in _BOUND:
            key, words = _BOUND[code]
            wrong_value(param, place, f"{shown(value)} {words} {context[key]:g}.")
        if code == "too_short":
            wrong_value(param, place, f"the array needs at least {context['min_length']} item.")
        if code == "string_too_long":
            wrong_value(param, place, f"a string of at most {context['max_length']} characters is allowed.")
        wrong_value(param, place, f"{item['msg'].removeprefix('Input ')} (got {shown(value)}).")
    except InvalidRequestError as error:
        return error


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    """The field names of the body, or of the object at `path` inside it."""
    for name in path:
        inner = model.model_fields[name].annotation
        options = [inner, *getattr(inner, "__args__", ())]
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return list(model.model_fields)
