"""An answer as a row of blocks: thoughts, texts and calls, in the order in which the model wrote them.

What a chat message lays side by side, other APIs list one after the other, and stream block by block: a block begins,
grows and ends before the next one begins. A whole answer is read piece by piece as a streamed one is, so that the two
cannot differ. Knows no API.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from sgray.serve.openai.choices import Piece, TokenEntry
from sgray.serve.openai.forms import Json
from sgray.serve.openai.reading import Reading

BlockKind = Literal["thinking", "text", "call"]


@dataclass
class Block:
    """One block as far as it is known. `name` and `call_id` are a call's; `entries` those of a text's tokens."""

    kind: BlockKind
    index: int
    name: str = ""
    call_id: str = ""
    parts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The thought, the text, or the call's arguments."""
        return "".join(self.parts)

    @property
    def is_object(self) -> bool:
        """Whether the text is that of a JSON object, as a call's arguments should be."""
        try:
            return isinstance(json.loads(self.text), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block has more text, and the entries of the text's tokens."""

    block: Block
    text: str
    entries: list[TokenEntry]


@dataclass(frozen=True, slots=True)
class Closed:
    """A block has ended; `is_last` where the answer has too."""

    block: Block
    is_last: bool


BlockEvent = Opened | Grown | Closed


class BlockReader:
    """Reads the pieces of one choice. `blocks` are those that have begun; an answer without any has an empty text.

    After the last piece `finish_reason` says why the answer ended, in OpenAI's words, and `matched` what ended it.
    """

    def __init__(self, reading: Reading) -> None:
        self.blocks: list[Block] = []
        self.thinking_tokens = 0
        self.finish_reason = ""
        self.matched: int | str | None = None
        self._reader = reading.reader()
        self._is_plain = reading.is_plain
        self._is_open = False
        self._num_held = 0
        self._raw = ""
        self._num_chars = 0
        self._held: list[TokenEntry] = []

    def read(self, piece: Piece) -> list[BlockEvent]:
        """What the next piece makes."""
        is_last = piece.finish_reason is not None
        deltas = self._reader.read(piece.text, is_last=is_last)
        self._count(deltas, piece)
        events = [event for delta in deltas for event in self._events(delta)]
        if piece.finish_reason is not None:
            self.finish_reason = self._reader.finish_reason(piece.finish_reason)
            self.matched = piece.matched
            events += self._end()
        return events

    def _count(self, deltas: list[Json], piece: Piece) -> None:
        """Share out the tokens whose text has come out with this piece: by its length, where it is of several kinds."""
        self._held += [entry for entry in piece.entries if entry.is_text]
        if self._is_plain:  # the usual call: nothing is ever held back
            return
        self._num_held += len(piece.tokens)
        self._raw += piece.text
        self._num_chars += len(piece.text)
        if not deltas:
            return
        thought = sum(len(delta.get("reasoning_content", "")) for delta in deltas)
        is_pure = all("reasoning_content" in delta for delta in deltas)
        share = 1.0 if is_pure else min(1.0, thought / max(1, len(self._raw)))
        self.thinking_tokens += round(self._num_held * share)
        self._keep_entries("".join(delta.get("content", "") for delta in deltas))
        self._num_held, self._raw = 0, ""

    def _keep_entries(self, content: str) -> None:
        """Of the held entries, those of the tokens in which `content` stands. Thoughts and calls show none."""
        begin = self._raw.rfind(content)
        if not content:
            self._held = []
        elif begin > 0 and self._held:
            begin += self._num_chars - len(self._raw)
            ends = [entry.offset for entry in self._held[1:]] + [self._num_chars]
            self._held = [entry for entry, end in zip(self._held, ends, strict=True) if end > begin]

    def _events(self, delta: Json) -> list[BlockEvent]:
        if "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            function = call["function"]
            opened = self._open("call", function["name"], call["id"]) if "id" in call else []
            return opened + self._grow(function["arguments"], [])
        kind: BlockKind = "thinking" if "reasoning_content" in delta else "text"
        opened = [] if self._is_open and self.blocks[-1].kind == kind else self._open(kind)
        if kind == "thinking":
            return opened + self._grow(delta["reasoning_content"], [])
        entries, self._held = self._held, []
        return opened + self._grow(delta["content"], entries)

    def _open(self, kind: BlockKind, name: str = "", call_id: str = "") -> list[BlockEvent]:
        events = self._close(is_last=False)
        block = Block(kind, len(self.blocks), name, call_id)
        self.blocks.append(block)
        self._is_open = True
        return [*events, Opened(block)]

    def _grow(self, text: str, entries: list[TokenEntry]) -> list[BlockEvent]:
        if not text:
            return []
        block = self.blocks[-1]
        block.parts.append(text)
        block.entries += entries
        return [Grown(block, text, entries)]

    def _close(self, *, is_last: bool) -> list[BlockEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        return [Closed(self.blocks[-1], is_last)]

    def _end(self) -> list[BlockEvent]:
        events = [] if self.blocks else self._open("text")
        return events + self._close(is_last=True)
