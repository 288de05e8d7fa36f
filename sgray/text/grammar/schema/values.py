"""Whether a JSON value meets a schema: needed for the members of enumerations, which other keywords may rule out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Any

from sgray.text.grammar import regex
from sgray.text.grammar.automata import matches
from sgray.text.grammar.schema.document import Document, below
from sgray.text.grammar.schema.formats import format_tree


def key(value: Any) -> Hashable:
    """Equal for equal JSON values: 1 is 1.0, and neither is true."""
    if isinstance(value, dict):
        return ("object", frozenset((name, key(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return ("array", tuple(key(item) for item in value))
    return (isinstance(value, bool), value)


def types_of(value: Any) -> set[str]:
    """The names of a value's type: whole numbers have two."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {"null"} if value is None else {names[type(value)]}


def holds(document: Document, place: str, value: Any) -> bool:
    """Whether a value meets the schema at a place."""
    schema = document.at(place)
    if isinstance(schema, bool):
        return schema
    return all(
        (
            _applies(document, place, schema, value),
            own_keywords_hold(schema, value),
            _children_hold(document, place, schema, value),
        )
    )


def _applies(document: Document, place: str, schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the schemas hold that are applied to the value itself."""

    def count(keyword: str) -> int:
        return sum(holds(document, below(place, keyword, index), value) for index in range(len(schema[keyword])))

    if "$ref" in schema and not holds(document, document.target(place), value):
        return False
    if "allOf" in schema and count("allOf") < len(schema["allOf"]):
        return False
    if "anyOf" in schema and not count("anyOf"):
        return False
    if "oneOf" in schema and count("oneOf") != 1:
        return False
    return all(
        holds(document, below(place, "dependentSchemas", name), value)
        for name in schema.get("dependentSchemas", {})
        if isinstance(value, dict) and name in value
    )


def own_keywords_hold(schema: Mapping[str, Any], value: Any, *, has_lists: bool = True) -> bool:
    """Whether the keywords hold that need no other schema; without `has_lists`, enum and const aside."""
    return all(
        test(schema[name], value)
        for name, test in _TESTS.items()
        if name in schema and (has_lists or name not in ("enum", "const"))
    )


def _children_hold(document: Document, place: str, schema: Mapping[str, Any], value: Any) -> bool:
    if isinstance(value, list):
        return all(
            holds(document, child, item)
            for index, item in enumerate(value)
            for child in item_places(schema, place, index)
        )
    if not isinstance(value, dict):
        return True
    if "propertyNames" in schema and not all(holds(document, below(place, "propertyNames"), name) for name in value):
        return False
    return all(
        holds(document, child, inner) for name, inner in value.items() for child in member_places(schema, place, name)
    )


def member_places(schema: Mapping[str, Any], place: str, name: str) -> list[str]:
    """The places of the schemas that the member `name` must meet by the object schema at `place`."""
    found = [below(place, "properties", name)] if name in schema.get("properties", {}) else []
    for pattern in schema.get("patternProperties", {}):
        if pattern_holds(pattern, name):
            found.append(below(place, "patternProperties", pattern))
    if not found and "additionalProperties" in schema:
        found.append(below(place, "additionalProperties"))
    return found


def item_places(schema: Mapping[str, Any], place: str, index: int) -> list[str]:
    """The same for an item of an array."""
    if index < len(schema.get("prefixItems", ())):
        return [below(place, "prefixItems", index)]
    return [below(place, "items")] if "items" in schema else []


def pattern_holds(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text."""
    return matches(regex.parse(pattern), text, is_search=True)


def _format_holds(name: str, text: str) -> bool:
    tree = format_tree(name)
    return tree is None or matches(tree, text, is_search=False)


def _is_multiple(divisor: float, value: float) -> bool:
    return Fraction(repr(value)) % Fraction(repr(divisor)) == 0


def _on(*kinds: type) -> Callable[[Callable[[Any, Any], bool]], Callable[[Any, Any], bool]]:
    """A test that concerns values of some types alone."""

    def limited(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda given, value: not isinstance(value, kinds) or isinstance(value, bool) or test(given, value)

    return limited


_number, _text, _array, _object = _on(int, float), _on(str), _on(list), _on(dict)

_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "type": lambda given, value: bool(types_of(value) & set(given if isinstance(given, list) else [given])),
    "const": lambda given, value: key(given) == key(value),
    "enum": lambda given, value: key(value) in {key(one) for one in given},
    "minimum": _number(lambda given, value: bool(value >= given)),
    "maximum": _number(lambda given, value: bool(value <= given)),
    "exclusiveMinimum": _number(lambda given, value: bool(value > given)),
    "exclusiveMaximum": _number(lambda given, value: bool(value < given)),
    "multipleOf": _number(_is_multiple),
    "minLength": _text(lambda given, value: len(value) >= given),
    "maxLength": _text(lambda given, value: len(value) <= given),
    "pattern": _text(pattern_holds),
    "format": _text(_format_holds),
    "minItems": _array(lambda given, value: len(value) >= given),
    "maxItems": _array(lambda given, value: len(value) <= given),
    "uniqueItems": _array(lambda given, value: not given or len({key(item) for item in value}) == len(value)),
    "minProperties": _object(lambda given, value: len(value) >= given),
    "maxProperties": _object(lambda given, value: len(value) <= given),
    "required": _object(lambda given, value: set(given) <= set(value)),
    "dependentRequired": _object(
        lambda given, value: all(set(names) <= set(value) for name, names in given.items() if name in value)
    ),
}
