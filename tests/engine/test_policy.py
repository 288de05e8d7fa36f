"""The order of admission."""

from __future__ import annotations

from sgray.engine.policy import WINDOW, LongestPrefixFirst, choose_order, running_rank, waiting_rank
from sgray.engine.sequence import Sequence
from sgray.protocol import Request


def sequence(number: int, *, priority: int = 0, arrival: float = 0.0, retracted: bool = False) -> Sequence:
    return Sequence(
        Request(str(number), [1], priority=priority),
        number=number,
        arrival=arrival,
        seed=0,
        namespace=b"",
        hashes=[],
        max_length=9,
        stop_ids=frozenset(),
        is_retracted=retracted,
    )


def names(order: object) -> list[int]:
    return [item.number for item in order]  # type: ignore[attr-defined]


def test_priority_then_retracted_then_age() -> None:
    line = [sequence(3), sequence(1), sequence(4, retracted=True), sequence(5, priority=1), sequence(2, priority=-1)]
    assert names(sorted(line, key=waiting_rank)) == [5, 4, 1, 3, 2]


def test_the_youngest_of_the_lowest_priority_is_retracted_first() -> None:
    line = [sequence(3), sequence(1), sequence(4, retracted=True), sequence(5, priority=1)]
    assert names(sorted(line, key=running_rank))[-1] == 4


def test_fcfs_keeps_the_line() -> None:
    line = [sequence(number) for number in range(5)]
    assert names(choose_order("fcfs", lambda s: -s.number)(line, 0.0)) == [0, 1, 2, 3, 4]


def test_lpm_takes_the_longest_cached_prefix_within_a_priority() -> None:
    cached = {1: 10, 2: 30, 3: 20, 4: 99}
    line = [sequence(5, priority=2), *(sequence(n) for n in (1, 2, 3)), sequence(4, priority=-1)]
    order = choose_order("lpm", lambda s: cached.get(s.number, 0))
    assert names(order(line, 0.0)) == [5, 2, 3, 1, 4]


def test_lpm_lets_nobody_wait_for_ever() -> None:
    order = LongestPrefixFirst(lambda s: 100 * s.number, max_wait_s=5)
    line = [sequence(1, arrival=0), sequence(2, arrival=1), sequence(3, arrival=7), sequence(4, arrival=8)]
    assert names(order(line, 8.0)) == [1, 2, 4, 3]


def test_lpm_measures_only_the_head_of_a_long_line() -> None:
    measured: list[int] = []

    def measure(s: Sequence) -> int:
        measured.append(s.number)
        return s.number

    line = [sequence(number) for number in range(WINDOW + 50)]
    result = names(LongestPrefixFirst(measure)(line, 0.0))
    assert len(measured) == WINDOW
    assert result == [*range(WINDOW - 1, -1, -1), *range(WINDOW, WINDOW + 50)]
