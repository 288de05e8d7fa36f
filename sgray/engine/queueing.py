"""Who may wait: what the queue has to compute, which sequences give way when it is full, and which wait in vain.

Pure: lengths, times in seconds and measured speeds are arguments. What has streamed something already is never sent
away for want of room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from sgray.engine.sequence import Sequence

MAX_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class _Share:
    """What one waiting sequence has to compute: pages, by their hashes, that others may need as well, and the rest."""

    pages: list[int]
    num_rest: int


class QueuedTokens:
    """How many tokens are to be computed for those that wait.

    A page that several of them need is computed once, and counts once, from when the first came until the last has
    gone. What a sequence needs is what its `num_uncached` says when it comes.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._shares: dict[Sequence, _Share] = {}
        self._num_users: Counter[int] = Counter()  # of a page
        self._num_rest = 0

    @property
    def total(self) -> int:
        """Tokens of all."""
        return len(self._num_users) * self._page_size + self._num_rest

    def added_by(self, sequence: Sequence) -> int:
        """Tokens that this one would add."""
        share = self._share(sequence)
        return share.num_rest + sum(page not in self._num_users for page in share.pages) * self._page_size

    def freed_by(self, sequence: Sequence) -> int:
        """Tokens that nobody needs but this one, which waits."""
        share = self._shares[sequence]
        return share.num_rest + sum(self._num_users[page] == 1 for page in share.pages) * self._page_size

    def add(self, sequence: Sequence) -> None:
        """It waits from now on."""
        share = self._shares[sequence] = self._share(sequence)
        self._num_users.update(share.pages)
        self._num_rest += share.num_rest

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        share = self._shares.pop(sequence)
        self._num_rest -= share.num_rest
        for page in share.pages:
            self._num_users[page] -= 1
            if not self._num_users[page]:
                del self._num_users[page]

    def check(self, waiting: SequenceOf[Sequence]) -> None:
        """Prove that it counts those, and nothing of others."""
        assert self._shares.keys() == set(waiting), "the queue's tokens are not those of the queue"
        pages = Counter(page for share in self._shares.values() for page in share.pages)
        assert pages == self._num_users, "a page of the queue is counted wrongly"
        assert self._num_rest == sum(share.num_rest for share in self._shares.values()), "tokens of the queue are lost"

    def _share(self, sequence: Sequence) -> _Share:
        num_cached = len(sequence.tokens) - sequence.num_uncached
        pages = sequence.hashes[num_cached // self._page_size :]
        return _Share(pages, sequence.num_uncached - len(pages) * self._page_size)


def give_way(
    waiting: SequenceOf[Sequence],
    priority: int,
    num_over: int,
    num_tokens_over: int,
    freed_by: Callable[[Sequence], int],
) -> list[Sequence] | None:
    """Those that have to go for a newcomer of this priority, the least important and youngest first.

    `waiting` is sorted by `waiting_rank`. With the newcomer, the queue holds `num_over` sequences and `num_tokens_over`
    tokens too many; `freed_by` says how many tokens go with one. None, where all of a lower priority are not enough.
    """
    victims: list[Sequence] = []
    for sequence in reversed(waiting):
        if (num_over <= 0 and num_tokens_over <= 0) or sequence.request.priority >= priority:
            break
        if sequence.is_retracted:
            continue
        victims.append(sequence)
        num_over -= 1
        num_tokens_over -= freed_by(sequence)
    return victims if num_over <= 0 and num_tokens_over <= 0 else None


def is_late(sequence: Sequence, now: float, tokens_per_s: float) -> bool:
    """Whether the deadline has passed, or will have before the prompt could be computed at this speed (0: unknown)."""
    if sequence.deadline == math.inf:
        return False
    seconds = sequence.num_uncached / tokens_per_s if tokens_per_s and not sequence.is_retracted else 0.0
    return now + seconds > sequence.deadline


def retry_after(num_tokens: int, tokens_per_s: float) -> int:
    """Whole seconds until so many tokens are computed, from 1 to a minute; 1 where no speed is known."""
    if not tokens_per_s:
        return 1
    return min(MAX_RETRY_S, max(1, math.ceil(num_tokens / tokens_per_s)))
