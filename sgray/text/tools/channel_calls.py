"""Calls as messages to a recipient, a JSON object in their body: gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from sgray.text.channels import BEGINS, ENDS, FUNCTIONS, read_header
from sgray.text.source import Source, Waiting
from sgray.text.tools.calls import Calls
from sgray.text.tools.json_text import nested


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """A message whose header names a tool. The prompt may hold the header's first mark."""

    bare: str = "t"  # of "to="

    @property
    def marks(self) -> tuple[str, ...]:
        """See `Notation`."""
        return BEGINS

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """See `Notation`."""
        begin = source.position
        is_header = yield from source.accept("to=")
        for mark in BEGINS:
            is_header = is_header or (yield from source.accept(mark))
        source.position = begin
        header = (yield from read_header(source)) if is_header else None
        name = header.recipient.removeprefix(FUNCTIONS) if header is not None and header.is_call else None
        if name is None or name not in calls.tools:
            return False
        yield from source.blanks()
        char = yield from source.peek()
        is_empty = not char or (yield from self._end(source))
        if char != "{" and not is_empty:
            return False
        source.is_pinned = False
        calls.start(name)
        if is_empty:
            calls.arguments("{}")
            calls.end(is_whole=True)
        else:
            yield from self._arguments(source, calls)
        return True

    def _arguments(self, source: Source, calls: Calls) -> Waiting[None]:
        """Read the object and the end of the message; broken arguments are given out as they are up to that."""
        is_whole = yield from nested(source, calls.arguments)
        if not is_whole:
            yield from source.pass_until((*ENDS, *BEGINS), calls.arguments)
        calls.end(is_whole=is_whole)
        source.is_pinned = True
        end = source.position
        yield from source.blanks()
        if not (yield from self._end(source)):
            source.position = end
        source.is_pinned = False

    def _end(self, source: Source) -> Waiting[bool]:
        """Read what ends a message, if it comes next."""
        for mark in ENDS:
            if (yield from source.accept(mark)):
                return True
        return False
