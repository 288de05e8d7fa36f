"""Structural tags: free text in which certain beginnings are followed by what they announce.

Both forms that clients send are read: `{"type": "structural_tag", "format": {...}}`, and the older one with
`structures` and `triggers`. Schemas, patterns and grammars inside come out as GBNF that was written here. Formats that
speak of tokens, and notations of arguments other than JSON, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.gbnf import read_gbnf
from sgray.text.grammar.regex import read_regex
from sgray.text.grammar.schema.compiler import compile_schema
from sgray.text.grammar.schema.document import below

MAX_NESTING = 32
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ("style",)),
    "any_text": ((), ("excludes",)),
    "grammar": (("grammar",), ("syntax",)),
    "regex": (("pattern",), ()),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first", "excludes")),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("content", "min", "max"), ()),
}
_TEXTS = ("value", "pattern", "grammar", "begin", "separator")
_TEXT_LISTS = ("triggers", "excludes")
_FLAGS = ("at_least_one", "stop_after_first")


def structural_tag(value: Mapping[str, Any]) -> dict[str, Any]:
    """The tag as an engine takes it. Raises GrammarFault with the JSON Pointer of what is wrong in it."""
    if value.get("type", "structural_tag") != "structural_tag":
        raise GrammarFault("#/type", "it must be 'structural_tag'")
    if "format" in value:
        return {"type": "structural_tag", "format": _format(value["format"], "#/format", 0)}
    if "structures" not in value or "triggers" not in value:
        raise GrammarFault("#", "it has 'format', or 'structures' and 'triggers'")
    structures = value["structures"]
    if not isinstance(structures, list):
        raise GrammarFault("#/structures", "expected an array")
    tags = [_structure(one, below("#/structures", index)) for index, one in enumerate(structures)]
    old = {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}
    return {"type": "structural_tag", "format": _format(old, "#", 0)}


def _structure(value: Any, place: str) -> dict[str, Any]:
    """A tag of the older form."""
    if not isinstance(value, dict) or not {"begin", "end"} <= set(value):
        raise GrammarFault(place, "expected an object with 'begin', 'schema' and 'end'")
    content = {"type": "json_schema", "json_schema": value.get("schema") or {}}
    return {"type": "tag", "begin": value["begin"], "content": content, "end": value["end"]}


def _format(value: Any, place: str, depth: int) -> dict[str, Any]:
    """A checked format."""
    if depth > MAX_NESTING:
        raise GrammarFault(place, f"formats lie in each other in more than {MAX_NESTING} levels")
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or value["type"] not in _FIELDS:
        raise GrammarFault(place, f"expected an object whose 'type' is one of {', '.join(_FIELDS)}")
    required, allowed = _FIELDS[value["type"]]
    for name in required:
        if name not in value:
            raise GrammarFault(place, f"{name!r} is missing")
    for name, inner in value.items():
        if name not in ("type", *required, *allowed):
            raise GrammarFault(below(place, name), f"{name!r} is not supported in a format of type {value['type']!r}")
        _check_field(name, inner, below(place, name))
    written = _grammar(value, place)
    if written is not None:
        return {"type": "grammar", "grammar": written}
    found = dict(value)
    if "content" in value:
        found["content"] = _format(value["content"], below(place, "content"), depth + 1)
    for name in ("elements", "tags"):
        if name in value:
            found[name] = [_format(one, below(place, name, at), depth + 1) for at, one in enumerate(value[name])]
    if "tags" in value:
        _check_tags(found, place)
    return found


def _check_field(name: str, value: Any, place: str) -> None:
    if name in _TEXTS:
        _check_text(value, place)
    elif name == "end":
        for one in value if isinstance(value, list) and value else [value]:
            _check_text(one, place)
    elif name in _TEXT_LISTS:
        if not isinstance(value, list):
            raise GrammarFault(place, "expected an array of strings")
        for index, one in enumerate(value):
            _check_text(one, below(place, index))
            if not one:
                raise GrammarFault(below(place, index), "an empty text is everywhere")
    elif name in _FLAGS and not isinstance(value, bool):
        raise GrammarFault(place, "expected a boolean")
    elif name in ("elements", "tags") and (not isinstance(value, list) or not value):
        raise GrammarFault(place, "expected an array with something in it")
    elif name in ("min", "max") and (isinstance(value, bool) or not isinstance(value, int) or value < -(name == "max")):
        raise GrammarFault(place, "expected a whole number from 0 on, or -1 for no maximum")
    elif (name == "style" and value != "json") or (name == "syntax" and value != "ebnf"):
        raise GrammarFault(place, f"{value!r} is not supported, only {'json' if name == 'style' else 'ebnf'!r}")


def _check_text(value: Any, place: str) -> None:
    if not isinstance(value, str):
        raise GrammarFault(place, "expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise GrammarFault(place, "half of a surrogate pair is no text") from None


def _check_tags(found: Mapping[str, Any], place: str) -> None:
    """Every tag is announced by one trigger."""
    for index, tag in enumerate(found["tags"]):
        at = below(place, "tags", index)
        if tag["type"] != "tag":
            raise GrammarFault(at, "expected a format of type 'tag'")
        triggers: Sequence[str] = found.get("triggers", ())
        if found["type"] == "triggered_tags" and sum(map(tag["begin"].startswith, triggers)) != 1:
            raise GrammarFault(below(at, "begin"), f"it begins with one of the triggers {list(triggers)}, and only one")


def _grammar(value: Mapping[str, Any], place: str) -> str | None:
    """The grammar of a format that is one by itself."""
    name = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}.get(value["type"])
    if name is None:
        return None
    try:
        return {"json_schema": compile_schema, "regex": read_regex, "grammar": read_gbnf}[value["type"]](value[name])
    except GrammarFault as fault:
        raise GrammarFault(below(place, name), str(fault)) from None
