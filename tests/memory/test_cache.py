"""The owner of all pages: leases, copies, commits, eviction, promises, and the proof that nothing is lost."""

import random

import pytest

from sgray.memory.cache import KVLease, PrefixCache
from sgray.protocol import CacheEvent, namespace_key, page_hashes

SPACE = namespace_key()


def compute(cache: PrefixCache, tokens: list[int], namespace: bytes = SPACE) -> KVLease:
    """A lease on `tokens` with all of them computed and shared."""
    lease = cache.acquire(tokens, namespace)
    assert cache.grow(lease, len(tokens))
    cache.take_copy(lease)
    cache.commit(lease, tokens, len(tokens))
    cache.check()
    return lease


def fill(cache: PrefixCache, tokens: list[int], namespace: bytes = SPACE) -> None:
    cache.release(compute(cache, tokens, namespace))
    cache.check()


def hit(cache: PrefixCache, tokens: list[int], namespace: bytes = SPACE) -> int:
    lease = cache.acquire(tokens, namespace)
    cache.check()
    cache.release(lease)
    cache.check()
    return lease.num_cached


def test_a_first_lease_has_nothing_and_grows_by_whole_pages() -> None:
    cache = PrefixCache(10, 4)
    lease = cache.acquire([1, 2, 3, 4, 5], SPACE)
    assert (lease.num_cached, lease.pages) == (0, [])
    assert cache.grow(lease, 5) and len(lease.pages) == 2
    assert cache.grow(lease, 8) and len(lease.pages) == 2
    assert (cache.num_free, cache.num_leased, cache.num_evictable) == (8, 2, 0)
    cache.release(lease)
    cache.release(lease)
    cache.check()
    assert cache.num_free == 10


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 63, 64])
def test_hits_are_exact_to_the_token(page_size: int, shared: int) -> None:
    cache = PrefixCache(200, page_size)
    fill(cache, list(range(64)))
    assert hit(cache, [*range(shared), *range(1000, 1040)]) == shared


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_token_is_always_left_to_compute(page_size: int) -> None:
    cache = PrefixCache(100, page_size)
    fill(cache, list(range(32)))
    assert hit(cache, list(range(32))) == 31
    assert hit(cache, [0]) == 0


def test_a_limit_keeps_hits_down() -> None:
    cache = PrefixCache(100, 4)
    fill(cache, list(range(32)))
    assert [cache.acquire(list(range(32)), SPACE, limit=n).num_cached for n in (0, 3, 4, 9, 99)] == [0, 3, 4, 9, 31]
    cache.check()


def test_a_page_that_agrees_in_part_is_copied_to_a_fresh_one() -> None:
    cache = PrefixCache(100, 4)
    first = compute(cache, list(range(8)))
    lease = cache.acquire([0, 1, 2, 3, 4, 5, 90, 91], SPACE)
    assert lease.pages[0] == first.pages[0] and lease.pages[1] != first.pages[1]
    assert cache.take_copy(lease) == (first.pages[1], lease.pages[1])
    assert cache.take_copy(lease) is None
    cache.check()


def test_the_source_of_a_copy_is_not_evicted_before_the_copy_is_taken() -> None:
    cache = PrefixCache(8, 4)
    fill(cache, list(range(8)))
    lease = cache.acquire([0, 1, 2, 3, 4, 5, 90, 91], SPACE)
    assert cache.evict(99) == 0
    cache.check()
    assert cache.take_copy(lease) is not None
    assert cache.evict(99) == 1
    cache.check()


def test_a_lease_given_back_before_its_copy_frees_the_source() -> None:
    cache = PrefixCache(8, 4)
    fill(cache, list(range(8)))
    cache.release(cache.acquire([0, 1, 2, 3, 4, 5, 90, 91], SPACE))
    cache.check()
    assert cache.evict(99) == 2


def test_without_a_page_to_spare_the_last_tokens_are_computed_instead_of_copied() -> None:
    cache = PrefixCache(2, 4)
    fill(cache, list(range(8)))
    lease = cache.acquire([0, 1, 2, 3, 4, 5, 90, 91], SPACE)
    assert lease.num_cached == 4 and lease.copy is None
    assert cache.grow(lease, 8), "the page that could not be copied can be taken over"
    cache.check()


def test_growing_evicts_what_is_not_needed_and_nothing_else() -> None:
    cache = PrefixCache(6, 4)
    fill(cache, list(range(8)))
    fill(cache, list(range(100, 108)))
    lease = cache.acquire(list(range(200, 220)), SPACE)
    assert cache.grow(lease, 12)
    assert hit(cache, list(range(9))) == 4 and hit(cache, list(range(100, 109))) == 8
    assert not cache.grow(lease, 28)
    assert len(lease.pages) == 3 and cache.num_available == 3
    cache.check()


def test_work_in_flight_can_be_hit_before_it_ends() -> None:
    cache = PrefixCache(100, 4)
    first = compute(cache, list(range(10)))
    second = cache.acquire(list(range(10)), SPACE)
    assert second.num_cached == 8 and second.pages == first.pages[:2]


def test_generated_tokens_are_shared_page_by_page() -> None:
    cache = PrefixCache(100, 4)
    tokens = [1, 2, 3]
    lease = cache.acquire(tokens, SPACE)
    for token in range(10, 25):
        assert cache.grow(lease, len(tokens))
        cache.commit(lease, tokens, len(tokens))
        cache.check()
        tokens.append(token)
    cache.release(lease)
    assert hit(cache, [*tokens, 99]) == 16
    assert cache.snapshot() and set(cache.snapshot()) == set(page_hashes(tokens[:16], 4, SPACE))


def test_a_page_computed_twice_stays_with_its_lease_and_is_freed_with_it() -> None:
    cache = PrefixCache(100, 4)
    one, two = cache.acquire(list(range(8)), SPACE), cache.acquire(list(range(8)), SPACE)
    for lease in (one, two):
        assert cache.grow(lease, 8)
        cache.commit(lease, list(range(8)), 8)
        cache.check()
    assert two.duplicates == two.pages and set(one.pages).isdisjoint(two.pages)
    more = [*range(8), 50, 51, 52, 53]
    assert cache.grow(two, 12)
    cache.commit(two, more, 12)
    cache.check()
    cache.release(one)
    cache.check()
    cache.release(two)
    cache.check()
    assert (cache.num_free, cache.num_evictable) == (97, 3)
    assert hit(cache, [*more, 1]) == 12


def test_a_released_lease_leaves_only_whole_computed_pages() -> None:
    cache = PrefixCache(100, 4)
    lease = cache.acquire(list(range(30)), SPACE)
    assert cache.grow(lease, 30)
    cache.commit(lease, list(range(30)), 7)
    cache.release(lease)
    cache.check()
    assert (cache.num_free, cache.num_evictable, cache.num_leases) == (99, 1, 0)


def test_poisoned_pages_leave_the_tree() -> None:
    cache = PrefixCache(100, 4)
    fill(cache, [*range(4), 9, 9, 9, 9])
    lease = compute(cache, list(range(12)))
    cache.release(lease, is_poisoned=True)
    cache.check()
    assert hit(cache, list(range(13))) == 4


def test_promises_name_the_pages_that_others_compute() -> None:
    cache = PrefixCache(100, 4)
    tokens = list(range(18))
    hashes = cache.hashes(tokens, SPACE)
    assert cache.awaited(hashes, 17) is None
    lease = cache.acquire(tokens, SPACE)
    assert cache.awaited(hashes, 17) == hashes[3]
    assert cache.awaited(hashes, 11) == hashes[1]
    assert cache.awaited(hashes, 3) is None
    assert cache.awaited(cache.hashes([5, *tokens], SPACE), 17) is None
    assert cache.grow(lease, 18)
    cache.commit(lease, tokens, 9)
    assert not cache.is_promised(hashes[1]) and cache.is_promised(hashes[2])
    cache.release(lease)
    assert cache.awaited(hashes, 17) is None
    cache.check()


def test_known_tokens_are_counted_by_hash() -> None:
    cache = PrefixCache(100, 4)
    tokens = list(range(40))
    hashes = cache.hashes(tokens, SPACE)
    assert cache.num_known(hashes, 40) == 0
    fill(cache, tokens[:22])
    assert [cache.num_known(hashes, n) for n in (40, 20, 19, 7, 0)] == [20, 20, 16, 4, 0]


def test_pub_098_adapter_and_salt_are_separate_fields_of_the_key() -> None:
    cache = PrefixCache(100, 16)
    prompt = list(range(64))
    spaces = [
        namespace_key(adapter="X"),
        namespace_key(salt="X"),
        namespace_key(),
        namespace_key(adapter="X", weights_version="2"),
        namespace_key(adapter="X", salt="X"),
        namespace_key(media="X"),
    ]
    first, second = [], []
    for space in spaces:
        first.append(hit(cache, prompt, space))
        fill(cache, prompt, space)
    for space in spaces:
        second.append(hit(cache, prompt, space))
    assert first == [0] * len(spaces) and second == [63] * len(spaces)


def test_a_disabled_cache_shares_nothing() -> None:
    cache = PrefixCache(100, 4, disabled=True)
    fill(cache, list(range(8)))
    assert hit(cache, list(range(8))) == 0
    assert cache.hashes(list(range(8)), SPACE) == [] and cache.snapshot() == [] and cache.drain_events() == []
    assert cache.num_free == 100


def test_clearing_forgets_everything_and_says_so() -> None:
    cache = PrefixCache(10, 4)
    lease = compute(cache, list(range(8)))
    cache.clear()
    cache.check()
    assert cache.num_free == 10 and cache.snapshot() == []
    assert [event.kind for event in cache.drain_events()] == ["stored", "cleared"]
    cache.release(lease)
    cache.check()
    fill(cache, list(range(8)))
    assert cache.drain_events() == [CacheEvent("stored", page_hashes(list(range(8)), 4, SPACE))]


def test_events_followed_from_the_start_give_the_snapshot() -> None:
    cache = PrefixCache(12, 4)
    rng = random.Random(3)
    seen: set[int] = set()
    for _ in range(200):
        fill(cache, [rng.randrange(3) for _ in range(rng.randrange(1, 40))])
        for event in cache.drain_events():
            seen = seen | set(event.hashes) if event.kind == "stored" else seen - set(event.hashes)
        assert seen == set(cache.snapshot())


def test_the_proof_finds_a_lost_and_a_doubled_page() -> None:
    cache = PrefixCache(10, 4)
    lease = compute(cache, list(range(10)))
    page = lease.pages.pop()
    with pytest.raises(AssertionError, match="have an owner"):
        cache.check()
    lease.pages.append(lease.pages[0])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check()
    lease.pages[-1] = page
    cache.check()


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_pub_097_random_work_keeps_the_books(page_size: int) -> None:
    """Leases come, grow, commit, end and are thrown away while the tree is evicted; every page has one owner."""
    rng = random.Random(page_size)
    cache = PrefixCache(40, page_size)
    work: list[tuple[KVLease, list[int], bytes]] = []
    for _ in range(2000):
        act = rng.choice(["begin", "extend", "extend", "commit", "end", "throw", "evict", "hold", "end_hold"])
        if act == "begin" and len(work) < 6:
            space = namespace_key(salt=rng.choice(["", "a"]))
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * page_size + 2))]
            work.append((cache.acquire(tokens, space), tokens, space))
        elif act == "evict":
            cache.evict(rng.randrange(1, 10))
        elif act == "end_hold":
            cache.end_hold(rng.choice("xyz"))
        elif act == "hold" and work:
            cache.hold(rng.choice(work)[0], rng.choice("xyz"), 0.0)
        elif work:
            index = rng.randrange(len(work))
            lease, tokens, _ = work[index]
            if act in ("extend", "commit") and cache.grow(lease, len(tokens)):
                cache.take_copy(lease)
                if act == "commit":
                    cache.commit(lease, tokens, rng.randrange(lease.num_cached, len(tokens) + 1))
                else:
                    cache.commit(lease, tokens, len(tokens))
                    tokens += [rng.randrange(2) for _ in range(rng.randrange(1, page_size + 2))]
            elif act in ("end", "throw"):
                cache.release(lease, is_poisoned=act == "throw")
                work.pop(index)
        cache.check()
        assert cache.num_free + cache.num_evictable + cache.num_leased == cache.num_pages
        assert 0 <= cache.num_evictable <= cache.num_pages
    for lease, _, _ in work:
        cache.release(lease)
    assert cache.num_leased == 0
    cache.evict(cache.num_pages)
    cache.check()
    assert cache.num_free == cache.num_pages and cache.num_held == 0
    cache.end_silent_holds(1.0)
    cache.check()
