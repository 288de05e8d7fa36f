"""What a program has written so far: texts and messages in order. Knows nothing of templates, tokens or requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Act = tuple[Literal["text", "begin", "end"], str]


@dataclass(frozen=True)
class Turn:
    """One message; `is_open` while more may be written into it."""

    role: str
    content: str = ""
    is_open: bool = True


@dataclass(frozen=True)
class Prompt:
    """What the model goes on from: bare texts and messages in order. Only the last message can be open."""

    parts: tuple[str | Turn, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether there is no message in it."""
        return not any(isinstance(part, Turn) for part in self.parts)

    @property
    def text(self) -> str:
        """The bare texts together."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def turns(self) -> list[Turn]:
        """The messages."""
        return [part for part in self.parts if isinstance(part, Turn)]

    @property
    def is_chat(self) -> bool:
        """Whether it is messages alone, and more than none."""
        return bool(self.parts) and all(isinstance(part, Turn) for part in self.parts)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How long the common beginning of two texts or lists is."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((position for position, (left, right) in pairs if left != right), min(len(one), len(other)))


class Transcript:
    """Grows by acts, which can be played again elsewhere: that is how a branch is appended to its trunk."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self.written = ""  # every text, without what marks messages
        self._parts: list[str | Turn] = []

    def copy(self) -> Transcript:
        """One that grows on its own."""
        other = Transcript()
        other.acts, other.written, other._parts = list(self.acts), self.written, list(self._parts)
        return other

    def play(self, act: Act) -> None:
        """Do one act; raises ValueError for an end without a beginning, or a message inside another."""
        kind, value = act
        if kind == "text":
            self._write(value)
        elif kind == "begin":
            self._begin(value)
        else:
            self._end(value)
        self.acts.append(act)

    def prompt(self) -> Prompt:
        """What a model would go on from now."""
        return Prompt(tuple(self._parts))

    def messages(self) -> list[dict[str, str]]:
        """The messages in OpenAI's form, an open one included."""
        return [{"role": turn.role, "content": turn.content} for turn in self.prompt().turns]

    @property
    def _open(self) -> Turn | None:
        last = self._parts[-1] if self._parts else None
        return last if isinstance(last, Turn) and last.is_open else None

    def _write(self, text: str) -> None:
        self.written += text
        turn = self._open
        if turn is not None:
            self._parts[-1] = replace(turn, content=turn.content + text)
        elif text and self._parts and isinstance(last := self._parts[-1], str):
            self._parts[-1] = last + text
        elif text:
            self._parts.append(text)

    def _begin(self, role: str) -> None:
        if (turn := self._open) is not None:
            raise ValueError(f"a message of {role!r} begins inside one of {turn.role!r}, which must end first")
        self._parts.append(Turn(role))

    def _end(self, role: str) -> None:
        turn = self._open
        if turn is None or turn.role != role:
            raise ValueError(f"a message of {role!r} ends that has not begun")
        self._parts[-1] = replace(turn, is_open=False)
