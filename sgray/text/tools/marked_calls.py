"""Calls as a name and a JSON object between marks: DeepSeek V3, Kimi K2 and the newer form of Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sgray.text.source import Source, Waiting
from sgray.text.tools.calls import MAX_NAME_CHARS, Calls
from sgray.text.tools.json_text import nested


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """`open`, `lead`, the name, `name_end`, an object inside `fence`, `close`; all calls may stand in a `section`.

    Empty marks are not written. `named` finds the groups `name` and, where the notation has it, `id` in what stands in
    the name's place.
    """

    open: str
    name_end: str
    close: str = ""
    lead: str = ""
    fence: tuple[str, str] = ("", "")
    section: tuple[str, str] = ("", "")
    named: re.Pattern[str] = re.compile(r"(?P<name>.*)", re.DOTALL)
    bare: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """See `Notation`."""
        return tuple(mark for mark in (self.open, *self.section) if mark)

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """See `Notation`."""
        begin = source.position
        if calls.count and self.section[1] and (yield from source.accept(self.section[1])):
            source.is_pinned = False
            return True
        if self.section[0] and (yield from source.accept(self.section[0])):
            yield from source.blanks()
        if (yield from source.accept(self.open)) and (yield from self._call(source, calls)):
            return True
        source.position = begin
        return False

    def _call(self, source: Source, calls: Calls) -> Waiting[bool]:
        """Read a call behind its mark; False where it is none, else the source is not pinned any more."""
        yield from source.accept(self.lead)
        text = yield from source.until((self.name_end,), limit=MAX_NAME_CHARS)
        match = self.named.fullmatch(text.strip()) if text is not None else None
        if match is None or match["name"] not in calls.tools:
            return False
        identity = match.groupdict().get("id")
        yield from source.accept(self.name_end)
        yield from source.blanks()
        yield from source.accept(self.fence[0])
        yield from source.blanks()
        is_object = (yield from source.peek()) == "{"
        if not is_object and not (self.close and (yield from source.accept(self.close))):
            return False
        source.is_pinned = False
        calls.start(match["name"], identity)
        if is_object:
            yield from self._arguments(source, calls)
        else:
            calls.arguments("{}")
            calls.end(is_whole=True)
        return True

    def _arguments(self, source: Source, calls: Calls) -> Waiting[None]:
        """Read the object and what ends the call; broken arguments are given out as they are up to the closing mark."""
        is_whole = yield from nested(source, calls.arguments)
        if not is_whole:
            yield from source.pass_until((self.close,) if self.close else (), calls.arguments)
        calls.end(is_whole=is_whole)
        source.is_pinned = True
        end = source.position
        yield from source.blanks()
        yield from source.accept(self.fence[1])
        yield from source.blanks()
        if not self.close or not (yield from source.accept(self.close)):
            source.position = end
        source.is_pinned = False
