"""JSON values in text that comes in pieces: where they end, and no more; whether they are right is asked later."""

from __future__ import annotations

import json
import string as alphabets

from sgray.text.source import Emit, Source, Waiting

_SCALAR = frozenset("+-." + alphabets.digits + alphabets.ascii_letters)
_OUTSIDE_STRINGS = _SCALAR | frozenset(' \t\r\n{}[],:"')


def nested(source: Source, emit: Emit) -> Waiting[bool]:
    """Read an object or an array, which begins here, and hand its text to `emit` as it comes.

    False where the text ends before it, or where a character cannot belong to it; that character stays unread.
    """
    nesting = _Nesting()
    begin = source.position
    while True:
        if source.position == len(source.text):
            emit(source.text[begin:])
            if source.is_ended:
                return False
            source.forget()
            yield
            begin = source.position
            continue
        is_good = nesting.feed(source.text[source.position])
        source.position += is_good
        if not is_good or not nesting.closers:
            emit(source.text[begin : source.position])
            return is_good


class _Nesting:
    """The brackets that are open."""

    def __init__(self) -> None:
        self.closers: list[str] = []
        self._is_string = False
        self._is_escaped = False

    def feed(self, char: str) -> bool:
        """Take a character; False if it cannot stand here."""
        if self._is_string:
            self._is_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self.closers.append("}" if char == "{" else "]")
        elif char in "}]":
            return self.closers.pop() == char
        return self._is_string or char in _OUTSIDE_STRINGS


def string(source: Source) -> Waiting[str | None]:
    """Read a string and return its value; None where none stands here. The source must be pinned."""
    begin, is_escaped = source.position, False
    if not (yield from source.accept('"')):
        return None
    while char := (yield from source.peek()):
        source.position += 1
        if char == '"' and not is_escaped:
            break
        is_escaped = char == "\\" and not is_escaped
    try:
        return str(json.loads(source.text[begin : source.position]))
    except ValueError:
        return None


def value(source: Source) -> Waiting[str | None]:
    """Read any value and return its text; None where none stands here. The source must be pinned."""
    begin, char = source.position, (yield from source.peek())
    if char and char in "{[":
        is_whole = yield from nested(source, _drop)
        return source.text[begin : source.position] if is_whole else None
    if char == '"':
        return None if (yield from string(source)) is None else source.text[begin : source.position]
    while (yield from source.peek()) in _SCALAR:
        source.position += 1
    return source.text[begin : source.position] or None


def _drop(text: str) -> None:
    """The source, being pinned, still has it."""
