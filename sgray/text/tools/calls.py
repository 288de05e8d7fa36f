"""What a text with tool calls is made of: content, beginnings of calls, and pieces of their arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sgray.text.source import Source, Waiting

MAX_NAME_CHARS = 256
"""Where no name ends within so many characters, there is no call."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `id` is None where the notation has no ids."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class Notation(Protocol):
    """How one family of models writes calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What a call may begin with, anywhere in the text. None is the beginning of another, and none overlap."""
        ...

    @property
    def bare(self) -> str:
        """The characters with which a call without a mark may begin, at the beginning of the text alone."""
        ...

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """Read the calls that begin here, at a mark or bare. The source is pinned, and is not on return of True.

        False where no call begins here: nothing has been given out then, and the caller goes back.
        """
        ...


class Calls:
    """Collects the events of one text.

    `tools` are the parameters' JSON schemas by the names of the tools. White space between content and calls is dropped
    where it would be all that stands there.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self.count = 0
        self.are_whole = True
        self._events: list[Event] = []
        self._arguments: list[str] = []
        self._blanks = ""
        self._follows_call = False

    def content(self, text: str) -> None:
        """Text outside of calls; white space at its end waits for what follows."""
        kept = text.rstrip()
        if not kept:
            self._blanks += text
            return
        self._events.append(Content(self._blanks + kept))
        self._blanks = text[len(kept) :]
        self._follows_call = False

    def start(self, name: str, id: str | None = None) -> None:
        """A call begins."""
        self._events.append(CallStart(self.count, name, id))
        self._arguments = []
        self._blanks = ""
        self._follows_call = True
        self.count += 1

    def arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that began last."""
        if text:
            self._arguments.append(text)
            self._events.append(CallArguments(self.count - 1, text))

    def end(self, *, is_whole: bool) -> None:
        """The call that began last is over; it is whole only if its arguments are a JSON object."""
        self.are_whole = self.are_whole and is_whole and is_object("".join(self._arguments))

    def finish(self) -> None:
        """The text is over."""
        if self._blanks and not self._follows_call:
            self._events.append(Content(self._blanks))
        self._blanks = ""

    def taken(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object, by the standard: no NaN, no infinity."""
    return isinstance(parsed(text), dict)


def parsed(text: str) -> Any:
    """The value of a JSON text; None where it is not one (or is null)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(name)
