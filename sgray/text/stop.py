"""Stop strings at the text edge: cut the text before (or after) the first stop, send nothing that may have to be cut.

Knows characters alone, neither tokens nor requests. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgray.errors import InvalidRequestError


class StopStrings:
    """Watches one stream of text for the first of several stop strings.

    The first stop is the one that is complete first; of several that end at the same character the longest, so that
    nothing of any stop is left in the text. Only the longest end of the text that can still become a stop is held back.
    With `include` the stop itself is kept in the text. The cost is linear in the text for each stop.
    Raises InvalidRequestError for an empty stop string.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._watches = [_Watch(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matched

    def push(self, text: str) -> str:
        """Take the next piece of text; returns what can be sent now. After a match nothing is taken any more."""
        if self._matched is not None or not text:
            return ""
        if not self._held and not any(watch.may_begin_in(text) for watch in self._watches):
            return text
        for index, char in enumerate(text):
            ended = [watch.stop for watch in self._watches if watch.feed(char)]
            if ended:
                return self._cut(self._held + text[: index + 1], max(ended, key=len))
        whole = self._held + text
        keep = len(whole) - max(watch.depth for watch in self._watches)
        self._held = whole[keep:]
        return whole[:keep]

    def finish(self) -> str:
        """The text ended without (another) stop: returns what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _cut(self, text: str, stop: str) -> str:
        """`text` ends with `stop`."""
        self._matched = stop
        self._held = ""
        return text if self._include else text[: -len(stop)]


class _Watch:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt's search, fed by character).

    `depth` characters of `stop` are matched. `borders[i]` is the length of the longest proper prefix of `stop[: i + 1]`
    that is also its end; it grows only as far as the text ever matched, so a huge stop string costs nothing upfront.
    """

    def __init__(self, stop: str) -> None:
        if not stop:
            raise InvalidRequestError("a stop string may not be empty", param="stop")
        self.stop = stop
        self.depth = 0
        self._borders = [0]

    def may_begin_in(self, text: str) -> bool:
        """Whether any character of `text` could be the first of the stop string."""
        return self.stop[0] in text

    def feed(self, char: str) -> bool:
        """Take one character; returns whether the stop string ends with it. Not to be called after that."""
        self.depth = self._longest(self.depth, char)
        if self.depth > len(self._borders):
            self._borders.append(self._longest(self._borders[-1], char))
        return self.depth == len(self.stop)

    def _longest(self, matched: int, char: str) -> int:
        """The longest prefix of `stop` at the end of a text that ended with `matched` of it and goes on with `char`."""
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0
