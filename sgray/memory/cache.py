"""The owner of every page id: free, in the tree of shared prefixes, or private to one lease.

Knows tokens, pages and hashes; no tensor, no sequence, no device. Whoever computes gets a `KVLease` and gives it back;
there is no other way to a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sgray.memory.holds import Holds
from sgray.memory.pages import PageAllocator
from sgray.memory.radix import Match, RadixNode, RadixTree
from sgray.protocol import CacheEvent, chain_hashes

HELD_SHARE = 0.5  # of all pages; what is held beyond that is evicted first


@dataclass(eq=False, slots=True)
class KVLease:
    """The pages of one sequence. Read it; only the cache changes it.

    `pages` is the row: page `i` holds tokens `[i * page_size, (i + 1) * page_size)`. Tokens `[0, num_cached)` were
    there at the start. The tree knows the first `num_committed` pages of the sequence by content; where it knew one
    already when this lease had computed its own, the row keeps its own and `duplicates` names it. Private to the lease
    are the duplicates and all pages from `num_committed` on.
    """

    namespace: bytes
    hashes: list[int]
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_committed: int = 0
    duplicates: list[int] = field(default_factory=list)
    node: RadixNode | None = None
    copy: tuple[int, int] | None = None
    source: RadixNode | None = None


class PrefixCache:
    """Pages of one pool, shared by prefix. All methods are for one thread.

    `disabled` hands out and takes back pages and shares nothing.
    """

    def __init__(self, num_pages: int, page_size: int, *, disabled: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.disabled = disabled
        self._free = PageAllocator(num_pages)
        self._tree = RadixTree(page_size, int(num_pages * HELD_SHARE))
        self._holds = Holds(self._tree)
        self._leases: set[KVLease] = set()
        self._promises: dict[int, KVLease] = {}  # page hash -> the lease at work on that page

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._free.num_free

    @property
    def num_evictable(self) -> int:
        """Pages of the tree that no lease needs."""
        return self._tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that `grow` could give out now."""
        return self._free.num_free + self._tree.num_evictable

    @property
    def num_leased(self) -> int:
        """Pages that are locked in the tree or private to a lease."""
        return self.num_pages - self.num_available

    @property
    def num_held(self) -> int:
        """Pages of the tree that are evicted late, since somebody is likely to come back to them."""
        return self._tree.num_held

    @property
    def num_leases(self) -> int:
        """Leases not yet released."""
        return len(self._leases)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def hashes(self, tokens: list[int], namespace: bytes) -> list[int]:
        """The chained hashes of the whole pages of `tokens`; none if nothing is shared anyway."""
        return [] if self.disabled else _continue([], tokens, len(tokens) // self.page_size, self.page_size, namespace)

    def num_known(self, hashes: list[int], limit: int) -> int:
        """How many of the first `limit` tokens stand in whole pages of the tree now, by the hashes of their pages."""
        low, high = 0, min(len(hashes), limit // self.page_size)
        while low < high:  # a page is only there with all before it, so the known ones are a start of the list
            middle = (low + high) // 2
            if self._tree.has(hashes[middle]):
                low = middle + 1
            else:
                high = middle
        return low * self.page_size

    def awaited(self, hashes: list[int], limit: int) -> int | None:
        """The last page worth waiting for: one that a lease is at work on and that lies in the first `limit` tokens.

        Pages are named by their hashes, `hashes` are those of all whole pages. None if no page is anybody's work.
        """
        if self._promises.keys().isdisjoint(hashes):
            return None
        last = None
        for value in hashes[: limit // self.page_size]:
            if value in self._promises:
                last = value
            elif last is not None:
                break
        return last

    def is_promised(self, page_hash: int) -> bool:
        """Whether a lease is at work on that page."""
        return page_hash in self._promises

    def acquire(
        self, tokens: list[int], namespace: bytes, *, limit: int | None = None, hashes: list[int] | None = None
    ) -> KVLease:
        """A lease that starts with what the tree knows of `tokens[:limit]`, exact to the token; never fails.

        One token is always left to compute, for its logits: `limit` is at most `len(tokens) - 1`. Whole pages are
        locked in the tree. If tokens of the page behind them agree too, the lease gets a fresh page and `take_copy`
        tells from where to fill it; if memory is short for that, those tokens are computed instead. The lease promises
        the other whole pages of `tokens`, see `awaited`. `hashes` (of `tokens`, computed if absent) is kept and
        extended.
        """
        assert tokens, "a lease needs tokens"
        lease = KVLease(namespace, [] if hashes is None else hashes)
        self._leases.add(lease)
        if self.disabled:
            return lease
        _continue(lease.hashes, tokens, len(tokens) // self.page_size, self.page_size, namespace)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        match = self._tree.match(tokens, namespace, most)
        lease.node = self._tree.lock(match)
        lease.pages = match.pages
        lease.num_committed = len(match.pages)
        lease.num_cached = len(match.pages) * self.page_size
        if match.tail is not None:
            self._copy_tail(lease, match, self.pages_for(len(tokens)))
        for value in lease.hashes[lease.num_committed : len(tokens) // self.page_size]:
            self._promises.setdefault(value, lease)
        return lease

    def take_copy(self, lease: KVLease) -> tuple[int, int] | None:
        """The (source, destination) pages to copy before the lease's first step, once; then the source may go."""
        copy, lease.copy = lease.copy, None
        self._unlock_source(lease)
        return copy

    def grow(self, lease: KVLease, num_tokens: int) -> bool:
        """Make the row long enough for `num_tokens`, evicting if needed. False, with nothing changed, if it cannot."""
        missing = self.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return True
        pages = self._allocate(missing)
        if pages is None:
            return False
        lease.pages += pages
        return True

    def commit(self, lease: KVLease, tokens: list[int], num_computed: int) -> None:
        """Share the whole pages of `tokens[:num_computed]`, prompt and generated tokens alike.

        Must be called only when those positions have been computed in the lease's row.
        """
        start, end = lease.num_committed, num_computed // self.page_size
        if lease.node is None or end <= start:
            return
        size = self.page_size
        _continue(lease.hashes, tokens, end, size, lease.namespace)
        hashes, pages = lease.hashes[start:end], lease.pages[start:end]
        node, known = self._tree.insert(lease.node, tokens[start * size : end * size], pages, hashes)
        self._tree.lock_path(node, above=lease.node)
        lease.duplicates += pages[:known]
        lease.node = node
        lease.num_committed = end
        self._drop_promises(lease, hashes)

    def hold(self, lease: KVLease, holder: str, now: float) -> None:
        """Evict what the lease has shared later than other pages, until `end_hold`. Takes no page from anybody."""
        if lease.node is not None and lease.num_committed:
            self._holds.add(holder, lease.node, now)

    def end_hold(self, holder: str) -> None:
        """What was held for this holder is as good as any other page from now on."""
        self._holds.drop(holder)

    def end_silent_holds(self, since: float) -> None:
        """So for all holders that have held nothing new since then."""
        self._holds.drop_silent(since)

    def release(self, lease: KVLease, *, is_poisoned: bool = False) -> None:
        """Give a lease back; a second call does nothing. What was committed stays in the tree until it is evicted.

        `is_poisoned`: do not trust what the lease computed; it leaves the tree as far as nobody else holds it.
        """
        if lease not in self._leases:
            return
        self._leases.remove(lease)
        self._unlock_source(lease)
        self._drop_promises(lease, lease.hashes[lease.num_committed :])
        self._free.free(lease.duplicates)
        self._free.free(lease.pages[lease.num_committed :])
        if lease.node is not None:
            self._tree.unlock(lease.node)
            if is_poisoned:
                self._free.free(self._tree.prune(lease.node))
        lease.pages, lease.duplicates, lease.node, lease.copy = [], [], None, None

    def evict(self, count: int) -> int:
        """Drop up to `count` least recently used pages that no lease needs; returns how many."""
        pages = self._tree.evict(count)
        self._free.free(pages)
        return len(pages)

    def clear(self) -> None:
        """Forget everything and start anew; leases that are still out lose their pages without being told."""
        for lease in self._leases:
            lease.pages, lease.duplicates, lease.node, lease.copy, lease.source = [], [], None, None, None
        self._leases.clear()
        self._promises.clear()
        events = self._tree.drain_events()
        self._free = PageAllocator(self.num_pages)
        self._tree = RadixTree(self.page_size, self._tree.max_held)
        self._holds = Holds(self._tree)
        self._tree.restore_events([*events, CacheEvent("cleared")])

    def drain_events(self) -> list[CacheEvent]:
        """What became hittable and what no longer is, since the last call, in order."""
        return self._tree.drain_events()

    def snapshot(self) -> list[int]:
        """The hash of every page that can be hit."""
        return self._tree.hashes()

    def check(self) -> None:
        """Prove that each page has exactly one owner and each lock a holder; AssertionError with the numbers if not."""
        holders = [node for lease in self._leases for node in (lease.node, lease.source) if node is not None]
        self._tree.check(holders)
        owned = [*self._free.free_pages]
        for node in self._tree.nodes():
            owned += node.pages
        for lease in self._leases:
            owned += _private(lease)
        assert len(owned) == self.num_pages, f"{len(owned)} pages have an owner, the pool has {self.num_pages}"
        assert len(set(owned)) == len(owned), "a page has two owners"
        for lease in self._leases:
            self._check_row(lease)
        out = {id(lease) for lease in self._leases}
        assert all(id(lease) in out for lease in self._promises.values()), "a promise outlived its lease"

    def _check_row(self, lease: KVLease) -> None:
        """Each page of the row is in the tree at its place, or the lease's own."""
        known: list[int] = []
        step = lease.node
        while step is not None:
            known[:0] = step.pages
            step = step.parent
        assert len(known) == lease.num_committed, (len(known), lease.num_committed)
        own = set(lease.duplicates)
        for page, shared in zip(lease.pages, known, strict=False):
            assert page == shared or page in own, f"page {page} of a row is neither shared nor private"

    def _copy_tail(self, lease: KVLease, match: Match, num_pages: int) -> None:
        """Plan the copy of the page that agrees in part, unless to keep it would leave too little for `num_pages`."""
        assert match.tail is not None
        self._tree.lock_path(match.tail)
        fresh = None if num_pages - len(lease.pages) > self.num_available else self._allocate(1)
        if fresh is None:
            self._tree.unlock(match.tail)
            return
        lease.source = match.tail
        lease.copy = (match.tail_page, fresh[0])
        lease.pages += fresh
        lease.num_cached += match.tail_tokens

    def _unlock_source(self, lease: KVLease) -> None:
        if lease.source is not None:
            self._tree.unlock(lease.source)
            lease.source = None

    def _allocate(self, count: int) -> list[int] | None:
        short = count - self._free.num_free
        if short > self._tree.num_evictable:
            return None
        if short > 0:
            self.evict(short)
        return self._free.allocate(count)

    def _drop_promises(self, lease: KVLease, hashes: Iterable[int]) -> None:
        for value in hashes:
            if self._promises.get(value) is lease:
                del self._promises[value]


def _private(lease: KVLease) -> list[int]:
    return [*lease.duplicates, *lease.pages[lease.num_committed :]]


def _continue(hashes: list[int], tokens: list[int], count: int, page_size: int, namespace: bytes) -> list[int]:
    """Extend a chain of page hashes of `tokens` in place to at least `count` pages; returns it."""
    done = len(hashes)
    if done < count:
        parent = hashes[-1] if hashes else int.from_bytes(namespace[:8], "little")
        hashes += chain_hashes(tokens[done * page_size : count * page_size], page_size, parent)
    return hashes
