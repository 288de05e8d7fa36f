"""A JSON schema as a client sent it: its parts by JSON Pointer, its references, and whether each part is well formed.

A place is a JSON Pointer as a fragment: `#` is the whole schema, `#/properties/a` a part.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

from sgray.text.grammar.faults import GrammarFault

MAX_PARTS = 20_000
MAX_DEPTH = 100

_TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_SCHEMA = ("additionalProperties", "propertyNames", "items", "unevaluatedProperties", "unevaluatedItems")
_SHAPES: dict[str, str] = (
    dict.fromkeys(_SCHEMA, "schema")
    | dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), "schemas by name")
    | dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "array of schemas")
    | dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number")
    | dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), "count")
    | dict.fromkeys(("pattern", "format", "$ref", "$anchor", "$id"), "string")
    | {"type": "type", "enum": "array", "const": "anything", "required": "names", "multipleOf": "divisor"}
    | {"uniqueItems": "boolean", "dependentRequired": "names by name"}
)
_REFUSED = {
    "not": "what must not match cannot be held to while writing",
    "if": "conditions cannot be held to; write the cases with anyOf",
    "then": "conditions cannot be held to; write the cases with anyOf",
    "else": "conditions cannot be held to; write the cases with anyOf",
    "contains": "it cannot be held to; use prefixItems or items",
    "$dynamicRef": "references are resolved before writing; use $ref",
    "$recursiveRef": "references are resolved before writing; use $ref",
    "dependencies": "it was split into dependentRequired and dependentSchemas",
    "additionalItems": "it was replaced by items beside prefixItems",
}
_IGNORED = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("$schema", "$defs", "definitions", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "minContains"),
    *("maxContains", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"),
)
_KNOWN = (*_SHAPES, *_REFUSED, *_IGNORED)


class Document:
    """One schema. Raises GrammarFault with the place of what is wrong, where it is reached."""

    def __init__(self, schema: Any) -> None:
        self._parts: dict[str, Any] = {"#": schema}
        self._checked: set[str] = set()
        self._anchors: dict[str, str] | None = None

    def at(self, place: str) -> Mapping[str, Any] | bool:
        """The checked schema at a place."""
        schema = self._found(place)
        if place not in self._checked:
            if len(self._checked) >= MAX_PARTS:
                raise GrammarFault(place, f"the schema has more than {MAX_PARTS} parts")
            _check(schema, place)
            self._checked.add(place)
        if isinstance(schema, bool):
            return schema
        assert isinstance(schema, dict)
        return schema

    def target(self, place: str) -> str:
        """Where the reference in the schema at `place` leads."""
        schema = self._found(place)
        reference, at = schema["$ref"], f"{place}/$ref"
        base, _, fragment = reference.partition("#")
        root = self._parts["#"]
        if base and (not isinstance(root, dict) or base != str(root.get("$id", "")).rstrip("#")):
            raise GrammarFault(at, f"{reference!a} is outside of this schema; only places in it can be used")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._named(fragment)
            if found is None:
                raise GrammarFault(at, f"there is no $anchor {fragment!a}")
            return found
        target = "#" + fragment
        try:
            self._found(target)
        except KeyError:
            raise GrammarFault(at, f"nothing is at {reference!a}") from None
        return target

    def _found(self, place: str) -> Any:
        """What stands at a place; raises KeyError where nothing does."""
        if place not in self._parts:
            above, _, name = place.rpartition("/")
            value, key = self._found(above), plain(name)
            if isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
                self._parts[place] = value[int(key)]
            elif isinstance(value, dict):
                self._parts[place] = value[key]
            else:
                raise KeyError(place)
        return self._parts[place]

    def _named(self, anchor: str) -> str | None:
        if self._anchors is None:
            self._anchors = dict(_anchors(self._parts["#"], "#"))
        return self._anchors.get(anchor)


def below(place: str, *names: str | int) -> str:
    """The place of something inside the value at `place`."""
    return "/".join([place, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def plain(name: str) -> str:
    """One name of a JSON Pointer as it stands in the document."""
    return name.replace("~1", "/").replace("~0", "~")


def _anchors(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and isinstance(value.get("$anchor"), str):
        yield value["$anchor"], place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _anchors(inner, below(place, name))


def _check(schema: Any, place: str) -> None:
    """Raise for a schema that is none, and for what cannot be honoured in it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarFault(place, "a schema is an object or a boolean")
    if place.count("/") > 3 * MAX_DEPTH:
        raise GrammarFault(place, f"schemas lie in each other in more than {MAX_DEPTH} levels")
    if "$id" in schema and place != "#":
        raise GrammarFault(below(place, "$id"), "a schema inside a schema has no name of its own here")
    for keyword, value in schema.items():
        at = below(place, keyword)
        if keyword in _REFUSED:
            raise GrammarFault(at, f"'{keyword}' is not supported: {_REFUSED[keyword]}")
        if keyword in _SHAPES:
            _check_shape(_SHAPES[keyword], value, at)
        elif keyword not in _IGNORED and (near := difflib.get_close_matches(keyword, _KNOWN, n=1, cutoff=0.8)):
            raise GrammarFault(at, f"'{keyword}' is not a keyword; did you mean '{near[0]}'?")


def _check_shape(shape: str, value: Any, at: str) -> None:
    match shape:
        case "schema":
            is_good = isinstance(value, dict | bool)
        case "schemas by name":
            is_good = isinstance(value, dict)
        case "names by name":
            is_good = isinstance(value, dict) and all(map(_are_names, value.values()))
        case "array of schemas":
            is_good = isinstance(value, list) and bool(value)
        case "array":
            is_good = isinstance(value, list)
        case "names":
            is_good = _are_names(value)
        case "string":
            is_good = isinstance(value, str)
        case "boolean":
            is_good = isinstance(value, bool)
        case "count":
            is_good = _is_number(value) and value == int(value) and value >= 0
        case "number":
            is_good = _is_number(value)
        case "divisor":
            is_good = _is_number(value) and value > 0
        case "type":
            _check_type(value, at)
            return
        case _:
            is_good = True
    if not is_good:
        articles = {"count": "a whole number from 0 on", "divisor": "a number above 0", "number": "a number"}
        names = {"names": "an array of names", "array": "an array", "string": "a string", "boolean": "a boolean"}
        _fail(at, (articles | names | {"schema": "a schema (an object or a boolean)"}).get(shape, shape))


def _check_type(value: Any, at: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise GrammarFault(at, f"{ascii(value)[:80]} is not one of {', '.join(_TYPES)}, nor an array of them")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fail(at: str, expected: str) -> NoReturn:
    raise GrammarFault(at, f"expected {expected}")
