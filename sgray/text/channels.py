"""Messages on channels, as gpt-oss writes them: their headers, and a parser that tells reasoning from the answer.

The format is OpenAI's harmony. An answer is a row of messages, each with a header (channel, and for a tool call the
recipient) and a body: thoughts are on the channel `analysis`, what the user is told on `commentary` and `final`.
Knows neither tokens nor requests, nor which tools there are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sgray.text.reasoning import Split
from sgray.text.source import Emit, Source, Waiting

BEGINS = ("<|start|>", "<|channel|>")
BODY = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER_CHARS = 512
"""Where no header ends within so many characters, there is none."""

FUNCTIONS = "functions."
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before a body; empty where the model did not write it."""

    channel: str = ""
    recipient: str = ""

    @property
    def is_call(self) -> bool:
        """Whether the body is for a tool of the request. Built-in tools, which only thoughts talk to, are none."""
        return bool(self.recipient) and (self.channel != "analysis" or self.recipient.startswith(FUNCTIONS))


def read_header(source: Source) -> Waiting[Header | None]:
    """Read a header and the mark of its body; a message may also end without one. None, and nothing is read, where
    the text ends inside the header, or where it is too long for one. The source must be pinned."""
    text = yield from source.until((BODY, *ENDS), limit=MAX_HEADER_CHARS)
    if text is None:
        return None
    yield from source.accept(BODY)
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return Header(channel[1] if channel else "", recipient[1] if recipient else "")


class ChannelParser:
    """Splits one stream of text as `ReasoningParser` does, with the same options.

    Calls stay as they are in the content, headers and all, for whoever reads calls. Of all other messages the bodies
    alone are given out, and each begins on a new line.
    """

    def __init__(self, *, is_inside: bool | None = None, is_verbatim: bool = False) -> None:
        self._is_verbatim = is_verbatim
        self._source = Source()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._has_thought = self._has_said = self._has_content = self._is_new = False
        self._reader = self._read(is_inside)

    def push(self, text: str) -> Split:
        """Take the next piece of text; returns what is certain."""
        self._source.text += text
        next(self._reader, None)
        return self._taken()

    def finish(self) -> Split:
        """The text has ended; returns what was held back."""
        self._source.is_ended = True
        next(self._reader, None)
        return self._taken()

    def _taken(self) -> Split:
        split = Split("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return split

    def _read(self, is_inside: bool | None) -> Waiting[None]:
        source = self._source
        put: Emit = self._think if is_inside else self._say
        if is_inside is None and (yield from self._begins()):
            put = yield from self._message(put)
        while mark := (yield from source.pass_until((*BEGINS, *ENDS), put)):
            if mark in BEGINS:
                put = yield from self._message(put)
            else:
                yield from source.accept(mark)
                (self._give if put == self._give else self._mark)(mark)
                self._mark((yield from source.blanks()))
                put = self._say

    def _begins(self) -> Waiting[bool]:
        """Whether the text begins with a header, which then comes next. The prompt may hold its first mark."""
        source = self._source
        source.is_pinned = True
        begin = source.position
        blanks = yield from source.blanks()
        start = source.position
        for mark in (*BEGINS, "to="):
            if (yield from source.accept(mark)):
                source.position = start
                self._mark(blanks)
                return True
        source.position = begin
        source.is_pinned = False
        return False

    def _message(self, put: Emit) -> Waiting[Emit]:
        """Read the header that begins here; returns where its body goes, which is `put` where this is no header."""
        source = self._source
        source.is_pinned = True
        begin = source.position
        header = yield from read_header(source)
        source.is_pinned = False
        rest = source.text[begin:]
        if header is not None:
            read = source.text[begin : source.position]
        else:
            is_cut = source.is_ended and len(rest) <= MAX_HEADER_CHARS
            read = rest if is_cut else rest[: len(next((mark for mark in BEGINS if rest.startswith(mark)), "to="))]
            source.position = begin + len(read)
            if not is_cut:
                put(read)
                return put
            header = Header()
        self._is_new = True
        if header.is_call:
            self._give(read)
            return self._give
        self._mark(read)
        return self._think if header.channel == "analysis" else self._say

    def _think(self, text: str) -> None:
        if self._is_verbatim:
            self._mark(text)
            return
        self._reasoning.append("\n" + text if self._is_new and self._has_thought else text)
        self._has_thought, self._is_new = True, False

    def _say(self, text: str) -> None:
        self._give("\n" + text if self._is_new and self._has_said and not self._is_verbatim else text)
        self._has_said, self._is_new = True, False

    def _give(self, text: str) -> None:
        """Content as it is."""
        self._content.append(text)
        self._has_content = True

    def _mark(self, text: str) -> None:
        """What belongs to no body. Nothing may be lost of a verbatim text, nor change its place."""
        if self._is_verbatim:
            (self._content if self._has_content else self._reasoning).append(text)
