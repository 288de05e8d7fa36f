"""Server-sent events: chunks as bytes. A chunk of plain text, the usual one, is written without building its JSON.

APIs differ in how they frame chunks: with or without a name, an end mark, and what stands where an answer broke off.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from sgray.errors import SgrayError
from sgray.serve.openai.choices import Choice, Piece
from sgray.serve.openai.forms import Form, Json

DONE = b"data: [DONE]\n\n"


def encode_json(value: Any) -> bytes:
    """Compact JSON; `value` holds no NaN, infinity or lone surrogate."""
    return msgspec.json.encode(value)


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_event(error: SgrayError) -> bytes:
    """The event that ends a stream that failed. ASCII, since messages may quote what the client sent."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


class Framing(Protocol):
    """How the chunks of one stream become events."""

    @property
    def end(self) -> bytes:
        """What comes after the last chunk."""
        ...

    def event(self, chunk: Json) -> bytes:
        """One chunk."""
        ...

    def failure(self, error: SgrayError, request_id: str) -> bytes:
        """What ends a stream that failed, in place of the chunks that are missing and of the end."""
        ...


class DataEvents:
    """Events without a name, then a mark, as of OpenAI's completions."""

    end = DONE

    def event(self, chunk: Json) -> bytes:
        """One chunk."""
        return event(chunk)

    def failure(self, error: SgrayError, request_id: str) -> bytes:
        """The error in OpenAI's shape."""
        return error_event(error)


@dataclass(frozen=True)
class NamedEvents:
    """Events that carry their chunk's type as their name. `failed` gives the chunks of a failure."""

    failed: Callable[[SgrayError, str], list[Json]]
    end = b""

    def event(self, chunk: Json) -> bytes:
        """One chunk."""
        return b"event: " + str(chunk["type"]).encode() + b"\n" + event(chunk)

    def failure(self, error: SgrayError, request_id: str) -> bytes:
        """The chunks of the failure."""
        return b"".join(map(self.event, self.failed(error, request_id)))


class EventEncoder:
    """Writes the chunks of one call.

    All text chunks of a choice differ in the text alone, so what stands before and after it is taken once, from a
    chunk with a mark in the text's place.
    """

    def __init__(self, form: Form, framing: Framing, *, has_fast_text: bool) -> None:
        self._form = form
        self._framing = framing
        self._has_fast_text = has_fast_text
        self._json = msgspec.json.Encoder()
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece."""
        if not self._has_fast_text or piece.finish_reason or piece.entries:
            return b"".join(map(self._framing.event, self._form.chunks(choice, piece)))
        frame = self._frames.get(choice.index)
        if frame is None:
            frame = self._frames[choice.index] = self._frame(choice)
        return frame[0] + self._json.encode(piece.text) + frame[1]

    def _frame(self, choice: Choice) -> tuple[bytes, bytes]:
        mark = uuid.uuid4().hex
        (chunk,) = self._form.chunks(choice, Piece(text=mark))
        head, tail = self._framing.event(chunk).split(encode_json(mark))
        return head, tail
