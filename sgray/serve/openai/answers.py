"""A call that passed the checks, ready to run: as a whole answer, as chunks, or as chunks in bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sgray.serve.openai.choices import Choice, Piece
from sgray.serve.openai.forms import Form, Json
from sgray.serve.openai.generation import Generation
from sgray.serve.openai.sse import DataEvents, EventEncoder, Framing


@dataclass(frozen=True)
class Answer:
    """One of `whole`, `chunks` and `events` may be used, once. Leaving it early aborts the call in the engine.

    `is_stream` says what the caller asked for. All three raise a SgrayError where there is no answer, the two streams
    also after their first item.
    """

    form: Form
    generation: Generation
    is_stream: bool
    has_fast_text: bool = True
    framing: Framing = field(default_factory=DataEvents)

    async def whole(self) -> Any:
        """The whole answer."""
        pieces: dict[int, list[Piece]] = {choice.index: [] for choice in self.generation.choices}
        async with aclosing(self.generation.pieces()) as source:
            async for choice, piece in source:
                pieces[choice.index].append(piece)
        choices = [(choice, pieces[choice.index]) for choice in self.generation.choices]
        return self.form.whole(choices, self.generation.usage())

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """The chunks of a streamed answer."""
        opened: set[int] = set()
        async with aclosing(self.generation.pieces()) as source:
            async for choice, piece in source:
                for chunk in self._opening(choice, opened):
                    yield chunk
                for chunk in self.form.chunks(choice, piece):
                    yield chunk
        for chunk in self.form.closing(self.generation.usage()):
            yield chunk

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The same chunks as server-sent events, and the end."""
        opened: set[int] = set()
        encoder = EventEncoder(self.form, self.framing, has_fast_text=self.has_fast_text)
        async with aclosing(self.generation.pieces()) as source:
            async for choice, piece in source:
                if choice.index in opened:
                    if event := encoder.encode(choice, piece):
                        yield event
                    continue
                opening = self._opening(choice, opened)
                yield b"".join(map(self.framing.event, opening)) + encoder.encode(choice, piece)
        yield b"".join(map(self.framing.event, self.form.closing(self.generation.usage()))) + self.framing.end

    def _opening(self, choice: Choice, opened: set[int]) -> list[Json]:
        if choice.index in opened:
            return []
        opened.add(choice.index)
        return self.form.opening(choice.index)
