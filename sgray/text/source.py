"""Text that comes in pieces, read by generators that wait for more of it.

A reader is a generator that yields whenever it needs text that has not come yet, so it never sees where one piece ended
and the next began: whatever it makes of a text is the same for every way of cutting it. Knows characters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")
Waiting = Generator[None, None, ResultT]
Emit = Callable[[str], None]


class Source:
    """The text that has come and how far it has been read.

    While the source is pinned, no text is forgotten, so a reader may go back to a `position` that it remembers.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_ended = False
        self.is_pinned = False

    def forget(self) -> None:
        """Drop what has been read, unless the source is pinned; remembered positions are void after that."""
        if self.is_pinned:
            return
        if self.position == len(self.text):
            self.text, self.position = "", 0
        else:
            self.text = self.text[self.position :]
            self.position = 0

    def peek(self) -> Waiting[str]:
        """The next character, which stays unread; nothing at the end of the text."""
        while self.position == len(self.text):
            if self.is_ended:
                return ""
            yield
        return self.text[self.position]

    def blanks(self) -> Waiting[str]:
        """Read white space, as much as there is."""
        begin = self.position
        while (yield from self.peek()).isspace():
            self.position += 1
        return self.text[begin : self.position]

    def accept(self, mark: str) -> Waiting[bool]:
        """Read `mark` if it comes next; else read nothing."""
        while True:
            rest = self.text[self.position : self.position + len(mark)]
            if rest == mark:
                self.position += len(mark)
                return True
            if self.is_ended or not mark.startswith(rest):
                return False
            yield

    def until(self, marks: tuple[str, ...], *, limit: int | None = None) -> Waiting[str | None]:
        """Read the text before the first of `marks`, which stays unread.

        Reads nothing and returns None where the text ends without one, or where more than `limit` characters come
        before it. The source must be pinned.
        """
        begin, longest = self.position, max(map(len, marks))
        searched = begin
        while True:
            at, mark = first_mark(self.text, searched, marks)
            if mark:
                if limit is not None and at - begin > limit:
                    return None
                self.position = at
                return self.text[begin:at]
            searched = max(begin, len(self.text) - longest + 1)
            if self.is_ended or (limit is not None and searched - begin > limit):
                return None
            yield

    def pass_until(self, marks: tuple[str, ...], emit: Emit) -> Waiting[str]:
        """Hand the text before the first of `marks` to `emit` as it comes.

        Returns that mark, which stays unread; nothing at the end of the text. Only what may be the beginning of a mark
        is held back.
        """
        begins = {mark[0] for mark in marks}
        while True:
            end, mark = len(self.text), ""
            if not begins.isdisjoint(self.text):  # seldom: most texts are passed on as they are
                end, mark = first_mark(self.text, self.position, marks)
                if not mark and not self.is_ended:
                    end -= _held(self.text, self.position, marks)
            if end > self.position:
                emit(self.text[self.position : end])
                self.position = end
            if mark or self.is_ended:
                return mark
            self.forget()
            yield


def first_mark(text: str, begin: int, marks: tuple[str, ...]) -> tuple[int, str]:
    """The first place of any mark from `begin` on, and the mark; the end of the text and no mark if there is none."""
    places = ((text.find(mark, begin), mark) for mark in marks)
    return min(((at, mark) for at, mark in places if at >= 0), default=(len(text), ""))


def _held(text: str, begin: int, marks: tuple[str, ...]) -> int:
    """How many characters at the end of the text could be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    return next(
        (
            length
            for length in range(min(longest, len(text) - begin), 0, -1)
            if any(mark.startswith(text[len(text) - length :]) for mark in marks)
        ),
        0,
    )
