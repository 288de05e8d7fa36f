"""The order in which waiting sequences are looked at. Pure: ages and cached lengths are arguments.

Priority comes first everywhere; within one priority a retracted sequence, which has already streamed, goes before those
that have not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from sgray.engine.sequence import Sequence

Order = Callable[[list[Sequence], float], Iterable[Sequence]]
"""From the waiting sequences, sorted by `waiting_rank`, and the time now (seconds) to the order of admission."""

WINDOW = 128
MAX_WAIT_S = 5.0


def waiting_rank(sequence: Sequence) -> tuple[int, bool, int]:
    """Sorts a waiting line: priority, then retracted ones, then age."""
    return (-sequence.request.priority, not sequence.is_retracted, sequence.number)


def running_rank(sequence: Sequence) -> tuple[int, int]:
    """Sorts running sequences: the last one is the first to be retracted."""
    return (-sequence.request.priority, sequence.number)


def first_come_first_served(waiting: list[Sequence], now: float) -> Iterable[Sequence]:
    """By priority, then age."""
    return waiting


class LongestPrefixFirst:
    """Within a priority, those with the most cached tokens first, so that a hot prefix is used while it is there.

    Whoever has waited `max_wait_s` seconds goes first, by age, so nobody starves. Only the oldest `WINDOW` waiting
    sequences are measured; the others follow by age.
    """

    def __init__(self, num_cached: Callable[[Sequence], int], max_wait_s: float = MAX_WAIT_S) -> None:
        self._num_cached = num_cached
        self._max_wait_s = max_wait_s

    def __call__(self, waiting: list[Sequence], now: float) -> Iterable[Sequence]:
        """The order of admission."""
        return chain(sorted(waiting[:WINDOW], key=lambda sequence: self._rank(sequence, now)), waiting[WINDOW:])

    def _rank(self, sequence: Sequence, now: float) -> tuple[int, bool, int, int]:
        is_due = sequence.is_retracted or now - sequence.arrival >= self._max_wait_s
        return (
            -sequence.request.priority,
            not is_due,
            0 if is_due else -self._num_cached(sequence),
            sequence.number,
        )


def choose_order(policy: str, num_cached: Callable[[Sequence], int]) -> Order:
    """The order that `schedule.schedule_policy` names; `num_cached` tells how many tokens of a sequence are cached."""
    return LongestPrefixFirst(num_cached) if policy == "lpm" else first_come_first_served
