"""Calls whose arguments are tags with plain text in them: Qwen3-Coder and GLM 4.5.

The values are text; the tool's schema says which of them are numbers, objects and so on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgray.text.source import Source, Waiting
from sgray.text.tools.calls import MAX_NAME_CHARS, Calls, parsed

_MAX_STEPS = 8


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """`open`, `name_open`, the name, for each argument a key and a value, `end`, `close`.

    The name ends before any of `name_ends`, the first of which is read. `name_open`, `end` and `value_open` may be
    empty. `has_own_lines`: values stand on lines of their own.
    """

    open: str
    close: str
    key_open: str
    key_close: str
    value_close: str
    name_ends: tuple[str, ...]
    name_open: str = ""
    value_open: str = ""
    end: str = ""
    has_own_lines: bool = False
    bare: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """See `Notation`. Models leave out the outer tag at times."""
        return (self.open, self.name_open) if self.name_open else (self.open,)

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """See `Notation`. Arguments are given out one by one."""
        yield from source.accept(self.open)
        yield from source.blanks()
        if not (yield from source.accept(self.name_open)):
            return False
        name = yield from source.until(self.name_ends, limit=MAX_NAME_CHARS)
        name = name.strip() if name is not None else ""
        if name not in calls.tools:
            return False
        yield from source.accept(self.name_ends[0])
        source.is_pinned = False
        calls.start(name)
        is_whole = yield from self._arguments(source, calls, calls.tools[name])
        calls.end(is_whole=is_whole)
        source.is_pinned = False
        return True

    def _arguments(self, source: Source, calls: Calls, schema: Mapping[str, Any]) -> Waiting[bool]:
        """Read the arguments and the end of the call; False where something else comes, or nothing."""
        properties = _properties(schema)
        calls.arguments("{")
        separator = ""
        while True:
            source.forget()
            source.is_pinned = True
            yield from source.blanks()
            if not (yield from source.accept(self.key_open)):
                break
            key = yield from source.until((self.key_close,))
            if key is None:
                break
            key = key.strip()
            text = yield from self._value(source)
            if text is None:  # cut off: what is there goes out as such
                calls.arguments(f"{separator}{_text_of(key)}: {_text_of(source.text[source.position :])[:-1]}")
                source.position = len(source.text)
                return False
            calls.arguments(f"{separator}{_text_of(key)}: {_typed(text, kinds_of(properties.get(key), schema))}")
            separator = ", "
            source.is_pinned = False
        has_end = bool(self.end) and (yield from source.accept(self.end))
        place = source.position
        yield from source.blanks()
        if not (yield from source.accept(self.close)):
            source.position = place
            if not has_end:
                return False
        calls.arguments("}")
        return True

    def _value(self, source: Source) -> Waiting[str | None]:
        """Read the end of the key and the value; None where the text ends before the value does."""
        yield from source.accept(self.key_close)
        if self.value_open:
            yield from source.blanks()
            yield from source.accept(self.value_open)
        text = yield from source.until((self.value_close,))
        if text is None:
            return None
        yield from source.accept(self.value_close)
        return _own_lines(text) if self.has_own_lines else text


def _own_lines(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _typed(text: str, kinds: set[str]) -> str:
    """The JSON of a value: a string where the schema allows one, else what the text says if that is JSON."""
    plain = text.strip()
    if plain == "null" and (not kinds or "null" in kinds):
        return plain
    found = parsed(plain)
    if "string" in kinds or found is None or isinstance(found, str):
        return _text_of(text)
    return plain


def kinds_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema names, or that its values have; none where it says nothing.

    `root` is the schema that references inside it begin at.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_STEPS:
        return set()
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    kinds = {kind for kind in listed if isinstance(kind, str)}
    if kinds:
        return kinds
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else []
    values = [*(values or []), *([schema["const"]] if "const" in schema else [])]
    if any(isinstance(one, str) for one in values):
        return {"string"} | ({"null"} if None in values else set())
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            kinds |= kinds_of(option, root, depth + 1)
    return kinds | kinds_of(_referenced(schema.get("$ref"), root), root, depth + 1)


def _referenced(reference: Any, root: Any) -> Any:
    """What a reference inside the root schema leads to; None where it leads elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in reference[1:].split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _text_of(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
