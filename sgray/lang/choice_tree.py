"""The tokens of choices as a tree, so that what choices have in common is asked for once. Pure.

Choices that differ in their first token need one distribution between them, not one sequence each: the logprobs of
their tokens at the end of the prompt. So a choice needs a sequence only where it goes on behind a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgray.lang.choices import Entry

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Path:
    """A sequence to ask for: tokens behind the prompt, and the ids whose logprobs are wanted before and after each."""

    tokens: Tokens
    ids: list[int]


class ChoiceTree:
    """The tree of some choices' tokens. `paths` lead to every place at which a choice goes on."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._choices = [tuple(choice) for choice in choices]
        following: dict[Tokens, dict[int, None]] = {}
        for choice in self._choices:
            for position, token in enumerate(choice):
                following.setdefault(choice[:position], {})[token] = None
        ends = [at for at, tokens in following.items() if not any((*at, token) in following for token in tokens)]
        self.paths: list[Path] = []
        self._places: dict[Tokens, tuple[int, int]] = {}  # place -> which path, and how far along it
        for number, end in enumerate(ends):
            ids: dict[int, None] = {}
            for length in range(len(end) + 1):
                if end[:length] not in self._places:
                    self._places[end[:length]] = (number, length)
                    ids |= following[end[:length]]
            self.paths.append(Path(end, list(ids)))

    def entries(self, logprobs: Sequence[Sequence[Sequence[Entry]]]) -> list[list[Entry]]:
        """The entries of each choice's tokens. For each path, and each place along it from its beginning to its end,
        `logprobs` has the entries of the path's ids.
        """
        known = [[{entry[1]: entry for entry in place} for place in path] for path in logprobs]
        found = []
        for choice in self._choices:
            places = [self._places[choice[:position]] for position in range(len(choice))]
            found.append(
                [known[path][place][token] for token, (path, place) in zip(choice, places, strict=True)],
            )
        return found
