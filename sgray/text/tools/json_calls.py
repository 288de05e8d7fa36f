"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, one or several behind a mark.

The notation of Hermes and Qwen (between tags), of Llama 3 (without any mark, or behind one) and of Mistral (an array).
"""

from __future__ import annotations

from dataclasses import dataclass

from sgray.text.source import Source, Waiting
from sgray.text.tools.calls import Calls, parsed
from sgray.text.tools.json_text import nested, string, value

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`marks` come before the objects and `close` after them; between two stands a separator or nothing."""

    marks: tuple[str, ...]
    close: str = ""
    bare: str = ""

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """See `Notation`. An object that is no call of a known tool is content; the ones beside it still are calls."""
        has_call = has_content = False
        unsent: int | None = source.position  # what no call has made a matter of notation
        for mark in self.marks:
            if (yield from source.accept(mark)):
                break
        yield from source.blanks()
        is_array = yield from source.accept("[")
        while True:
            end = source.position
            yield from self._separator(source)
            item = source.position
            if (yield from source.peek()) != "{":
                break
            if (yield from self._call(source, calls)):
                has_call, unsent = True, None
                continue
            source.position = item
            if (yield from value(source)) is None:
                break
            calls.content(source.text[item if unsent is None else unsent : source.position])
            has_content, unsent = True, source.position
        if not has_call and not has_content:
            return False
        source.position = end
        if has_call:
            yield from self._tail(source, is_array=is_array)
        source.is_pinned = False
        return True

    def _separator(self, source: Source) -> Waiting[None]:
        yield from source.blanks()
        if not (yield from source.accept(",")):
            yield from source.accept(";")
        yield from source.blanks()

    def _tail(self, source: Source, *, is_array: bool) -> Waiting[None]:
        """Read what ends the calls, if it comes; closing brackets too many are a slip that means nothing."""
        end = source.position
        yield from source.blanks()
        if is_array and (yield from source.accept("]")):
            end = source.position
        while (yield from source.peek()) in ("}", "]", " ", "\n") and self.close:
            source.position += 1
        if not self.close or not (yield from source.accept(self.close)):
            source.position = end

    def _call(self, source: Source, calls: Calls) -> Waiting[bool]:
        """Read an object; False where it is no call. The source is pinned again behind it."""
        name = arguments = None
        yield from source.accept("{")
        while True:
            yield from source.blanks()
            if (yield from source.accept("}")):
                break
            key = yield from _key(source)
            if key == "name":
                name = yield from string(source)
                if name not in calls.tools:
                    return False
            elif key in _ARGUMENTS and name is not None and (yield from source.peek()) == "{":
                yield from self._stream(source, calls, name)
                return True
            else:
                text = yield from value(source)
                if key is None or text is None:
                    return False
                arguments = text if key in _ARGUMENTS else arguments
            yield from source.blanks()
            yield from source.accept(",")
        text = _object_text(arguments)
        if name is None or text is None:
            return False
        calls.start(name)
        calls.arguments(text)
        calls.end(is_whole=True)
        return True

    def _stream(self, source: Source, calls: Calls, name: str) -> Waiting[None]:
        """Read the arguments and what else is in the call's object.

        Of arguments that are broken, everything up to the closing mark is given out as it is.
        """
        source.is_pinned = False
        calls.start(name)
        is_whole = yield from nested(source, calls.arguments)
        if not is_whole:
            yield from source.pass_until((self.close,) if self.close else (), calls.arguments)
        calls.end(is_whole=is_whole)
        source.is_pinned = True
        end = source.position
        while is_whole:
            yield from source.blanks()
            if (yield from source.accept("}")):
                return
            is_whole = (
                (yield from source.accept(","))
                and (yield from source.blanks()) is not None
                and (yield from _key(source)) is not None
                and (yield from value(source)) is not None
            )
        source.position = end


def _key(source: Source) -> Waiting[str | None]:
    """Read a key, its colon and the white space after it; None where there is no such thing."""
    key = yield from string(source)
    yield from source.blanks()
    if not (yield from source.accept(":")):
        return None
    yield from source.blanks()
    return key


def _object_text(arguments: str | None) -> str | None:
    """Arguments as the text of an object: none at all are an empty one, and some models write one into a string."""
    if arguments in (None, "null", '""'):
        return "{}"
    found = parsed(arguments)
    if isinstance(found, str):
        arguments, found = found, parsed(found)
    return arguments if isinstance(found, dict) else None
