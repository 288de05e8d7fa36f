"""Who is held goes last: by whom, for how long, and never at the cost of somebody who needs the page."""

from __future__ import annotations

import pytest

from sgray.memory import holds
from sgray.memory.cache import PrefixCache
from sgray.protocol import namespace_key

SPACE = namespace_key()
PAGE = 4


def text(seed: int, num_pages: int = 1) -> list[int]:
    return [seed * 1000 + index for index in range(num_pages * PAGE)]


def compute(cache: PrefixCache, tokens: list[int], holder: str = "", now: float = 0.0) -> None:
    """A sequence of these tokens that has come and gone."""
    lease = cache.acquire([*tokens, 7], SPACE)
    assert cache.grow(lease, len(tokens))
    cache.take_copy(lease)
    cache.commit(lease, tokens, len(tokens))
    if holder:
        cache.hold(lease, holder, now)
    cache.release(lease)
    cache.check()


def known(cache: PrefixCache, tokens: list[int]) -> int:
    lease = cache.acquire([*tokens, 7], SPACE)
    found = lease.num_committed
    cache.release(lease)
    return found


def test_what_is_held_outlives_what_was_used_later() -> None:
    cache = PrefixCache(8, PAGE)
    compute(cache, text(1, 2), "program")
    for seed in range(2, 20):
        compute(cache, text(seed))
    assert known(cache, text(1, 2)) == 2 and cache.num_held == 2


def test_what_is_held_gives_way_to_whoever_cannot_do_without() -> None:
    cache = PrefixCache(8, PAGE)
    compute(cache, text(1, 4), "program")
    assert cache.num_available == 8
    compute(cache, text(2, 8))
    assert known(cache, text(2, 8)) == 8 and cache.num_held == 0
    cache.end_hold("program")
    cache.check()


def test_the_end_of_a_hold_makes_its_pages_ordinary_at_once() -> None:
    cache = PrefixCache(8, PAGE)
    compute(cache, text(1, 2), "program")
    cache.end_hold("program")
    cache.end_hold("program")
    assert cache.num_held == 0
    for seed in range(2, 20):
        compute(cache, text(seed))
    assert known(cache, text(1, 2)) == 0


def test_a_prefix_that_two_hold_is_held_until_both_have_ended() -> None:
    cache = PrefixCache(16, PAGE)
    compute(cache, text(1, 2), "one")
    compute(cache, [*text(1, 2), *text(2)], "other")
    assert cache.num_held == 3
    cache.end_hold("other")
    assert cache.num_held == 2
    cache.end_hold("one")
    assert cache.num_held == 0


def test_more_than_half_of_the_memory_is_not_held_for_long() -> None:
    cache = PrefixCache(8, PAGE)
    for seed in range(1, 5):
        compute(cache, text(seed, 2), f"program {seed}")
    assert cache.num_held == 8
    compute(cache, text(9))
    compute(cache, text(10))
    compute(cache, text(11, 2))
    assert cache.num_held == 4
    assert [known(cache, text(seed, 2)) for seed in range(1, 5)] == [0, 0, 2, 2], "the oldest went first"


def test_a_holder_that_is_silent_is_dropped() -> None:
    cache = PrefixCache(8, PAGE)
    compute(cache, text(1), "one", now=1.0)
    compute(cache, text(2), "other", now=2.0)
    compute(cache, text(1), "one", now=3.0)
    cache.end_silent_holds(2.5)
    assert cache.num_held == 1
    cache.end_silent_holds(3.5)
    assert cache.num_held == 0


def test_holders_and_their_ends_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MAX_HOLDERS", 2)
    monkeypatch.setattr(holds, "MAX_ENDS", 2)
    cache = PrefixCache(64, PAGE)
    for seed in range(1, 4):
        compute(cache, text(seed), "one")
    assert cache.num_held == 2
    for holder in ("two", "three"):
        compute(cache, text(9), holder)
    assert cache.num_held == 1, "the holder that was silent longest made room"


def test_an_emptied_cache_holds_nothing() -> None:
    cache = PrefixCache(8, PAGE)
    compute(cache, text(1), "program")
    cache.clear()
    assert cache.num_held == 0
    cache.end_hold("program")
    cache.check()
