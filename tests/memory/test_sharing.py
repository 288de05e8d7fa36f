"""What running sequences have in common, found in the tree above their leases."""

from __future__ import annotations

import random

import pytest

from sgray.memory.cache import KVLease, PrefixCache
from sgray.memory.sharing import shared_spans

SIZE = 4
Spans = list[tuple[int, int, list[int]]]


def run(prompts: list[list[int]], num_pages: int = 400) -> tuple[PrefixCache, list[KVLease]]:
    """One lease a prompt, each computed before the next begins."""
    cache = PrefixCache(num_pages, SIZE)
    leases = []
    for prompt in prompts:
        lease = cache.acquire(prompt, b"")
        assert cache.grow(lease, len(prompt))
        cache.take_copy(lease)
        cache.commit(lease, prompt, len(prompt))
        leases.append(lease)
    return cache, leases


def tokens(*runs: tuple[int, int]) -> list[int]:
    """Runs of (first token, number of pages), and two tokens of an unfinished page."""
    return [first + index for first, pages in runs for index in range(pages * SIZE)] + [1, 2]


def ordered(spans: Spans) -> Spans:
    return sorted((begin, end, sorted(members)) for begin, end, members in spans)


def test_a_common_prefix_is_one_span() -> None:
    _, leases = run([tokens((100, 5), (first, 2)) for first in (200, 300, 400)])
    assert ordered(shared_spans(leases, SIZE, 1)) == [(0, 5 * SIZE, [0, 1, 2])]


def test_spans_nest_and_follow_each_other() -> None:
    _, leases = run(
        [tokens((100, 3), (200, 2), (300, 1)), tokens((100, 3), (200, 2), (400, 1)), tokens((100, 3), (500, 1))]
    )
    spans = shared_spans(leases, SIZE, 1)
    assert spans == [(0, 3 * SIZE, [0, 1, 2]), (3 * SIZE, 5 * SIZE, [0, 1])]


def test_runs_with_the_same_readers_are_one_span() -> None:
    cache, leases = run([tokens((100, 3), (200, 2), (first, 1)) for first in (300, 400)])
    _, [other] = cache, [cache.acquire(tokens((100, 3)), b"")]
    assert ordered(shared_spans(leases, SIZE, 1)) == [(0, 5 * SIZE, [0, 1])]
    assert ordered(shared_spans([*leases, other], SIZE, 1)) == [(0, 3 * SIZE, [0, 1, 2]), (3 * SIZE, 5 * SIZE, [0, 1])]


def test_what_saves_too_little_goes_to_the_spans_below() -> None:
    _, leases = run([tokens((100, 1), (first, 8), (first + 50, 1 + index)) for first in (200, 300) for index in (0, 1)])
    short = 3 * SIZE  # three of the four need not read the first page again
    assert ordered(shared_spans(leases, SIZE, short)) == [
        (0, SIZE, [0, 1, 2, 3]),
        (SIZE, 9 * SIZE + SIZE, [0, 1]),
        (SIZE, 9 * SIZE + SIZE, [2, 3]),
    ]
    assert ordered(shared_spans(leases, SIZE, short + 1)) == [(0, 10 * SIZE, [0, 1]), (0, 10 * SIZE, [2, 3])]
    assert shared_spans(leases, SIZE, 10**6) == []


def test_nothing_in_common_is_no_span() -> None:
    _, leases = run([tokens((first, 3)) for first in (100, 200, 300)])
    assert shared_spans(leases, SIZE, 1) == []
    assert shared_spans([], SIZE, 1) == []


def test_who_has_computed_pages_of_its_own_reads_those() -> None:
    """Two leases of the same prompt that were there before either had committed."""
    cache = PrefixCache(50, SIZE)
    prompt = tokens((100, 4))
    leases = [cache.acquire(prompt, b"") for _ in range(2)]
    for lease in leases:
        assert cache.grow(lease, len(prompt))
        cache.commit(lease, prompt, len(prompt))
    late = cache.acquire(prompt, b"")
    assert leases[1].duplicates
    assert shared_spans([*leases, late], SIZE, 1) == [(0, 4 * SIZE, [0, 2])]


def test_without_a_cache_nothing_is_shared() -> None:
    cache = PrefixCache(50, SIZE, disabled=True)
    leases = [cache.acquire(tokens((100, 4)), b"") for _ in range(2)]
    assert shared_spans(leases, SIZE, 1) == []


@pytest.mark.parametrize("seed", range(30))
def test_random_trees_share_just_what_rows_of_pages_have_in_common(seed: int) -> None:
    draw = random.Random(seed)
    prompts: list[list[int]] = [[]]
    for _ in range(draw.randint(2, 14)):
        base = draw.choice(prompts)
        cut = draw.randint(0, len(base))
        prompts.append(base[:cut] + [draw.randint(0, 5) for _ in range(draw.randint(1, 9 * SIZE))])
    _, leases = run(prompts[1:])
    spans = shared_spans(leases, SIZE, 1)
    covered = [0] * len(leases)
    for begin, end, members in spans:
        assert len(members) > 1 and begin < end
        for index in members:
            assert covered[index] == begin
            covered[index] = end
        rows = [leases[index].pages[begin // SIZE : end // SIZE] for index in members]
        assert all(row == rows[0] for row in rows)
    for index, lease in enumerate(leases):
        others = {page for other in leases if other is not lease and not other.duplicates for page in other.pages}
        common = [] if lease.duplicates else [page for page in lease.pages if page in others]
        assert covered[index] == len(common) * SIZE
