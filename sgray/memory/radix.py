"""The radix tree of shared prefixes: runs of whole pages, told apart by the tokens they hold.

Knows tokens, page ids and locks; holds no tensor and owns no free list. The idea of a radix tree over prompts with
least-recently-used leaves is RadixAttention's (SGLang, Zheng et al. 2024); the layout here is our own: page-aligned
runs, children kept sorted so that the best match inside a page is a neighbour, intrusive lists of unlocked leaves,
and a chained hash per page so that the outside can follow the tree by events.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sgray.protocol import CacheEvent

Key = tuple[int, ...]


class RadixNode:
    """A run of whole pages below its parent; a root is an empty run.

    `locks` counts the holders of this node or of one below it: a node is never locked under an unlocked parent. So do
    `holds`, which only say who goes last. When a node is split the object keeps the *end* of the run, so a holder's end
    stays where it was.
    """

    __slots__ = (
        "children",
        "hashes",
        "holds",
        "keys",
        "locks",
        "namespace",
        "newer",
        "older",
        "pages",
        "parent",
        "tick",
        "tokens",
    )

    def __init__(
        self, parent: RadixNode | None, tokens: list[int], pages: list[int], hashes: list[int], namespace: bytes = b""
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.hashes = hashes
        self.namespace = namespace
        self.children: dict[Key, RadixNode] = {}
        self.keys: list[
            Key
        ] = []  # of the children, sorted: the longest common start is found beside the bisection point
        self.locks = 0
        self.holds = 0
        self.tick = 0
        self.older: RadixNode | None = None
        self.newer: RadixNode | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """How far the tree knows some tokens: the first `depth` pages of `node`, and all nodes above it.

    `pages` are the whole pages from the start of the search. `tail` is the node that holds, at `tail_page`, a page of
    which only the first `tail_tokens` tokens agree; None if not even one token more is known.
    """

    node: RadixNode
    depth: int
    pages: list[int]
    tail: RadixNode | None = None
    tail_page: int = -1
    tail_tokens: int = 0


class RadixTree:
    """Prefixes by namespace. `num_pages` counts all pages in the tree, `num_locked` those that may not be evicted.

    Pages on a held path (`num_held`) are evicted after all others, as long as there are at most `max_held` of them.
    """

    def __init__(self, page_size: int, max_held: int = 0) -> None:
        assert page_size > 0, page_size
        self.page_size = page_size
        self.max_held = max_held
        self.num_pages = 0
        self.num_locked = 0
        self.num_held = 0
        self._roots: dict[bytes, RadixNode] = {}
        self._stored: set[int] = set()
        self._events: list[CacheEvent] = []
        self._tick = 0
        self._ring = _ring()  # the unlocked leaves that nobody holds
        self._held_ring = _ring()  # the unlocked leaves that somebody holds

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free."""
        return self.num_pages - self.num_locked

    def root(self, namespace: bytes) -> RadixNode:
        """The root of a namespace, made if it is new; it goes when it is empty and unlocked."""
        root = self._roots.get(namespace)
        if root is None:
            seed = int.from_bytes(namespace[:8], "little")
            root = self._roots[namespace] = RadixNode(None, [], [], [seed], namespace)
        return root

    def match(self, tokens: list[int], namespace: bytes, limit: int | None = None) -> Match:
        """What is known of `tokens[:limit]`. Modifies nothing but that it makes the root."""
        return self._descend(self.root(namespace), tokens, len(tokens) if limit is None else min(limit, len(tokens)))

    def has(self, page_hash: int) -> bool:
        """Whether the page with that chained hash, and so all before it, can be hit."""
        return page_hash in self._stored

    def lock(self, match: Match) -> RadixNode:
        """Keep the matched whole pages from eviction; returns the node that ends there, split off if need be."""
        node = self._end(match)
        self.lock_path(node)
        return node

    def lock_path(self, node: RadixNode, above: RadixNode | None = None) -> None:
        """Lock `node` and what is above it, up to but without `above`, which is an ancestor the caller has locked."""
        self._tick += 1
        step: RadixNode | None = node
        while step is not above and step is not None:
            if step.locks == 0:
                self.num_locked += len(step.pages)
                self._unlink(step)
            step.locks += 1
            step.tick = self._tick
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one lock of the path to `node`; leaves that become free are the last to be evicted."""
        self._tick += 1
        step: RadixNode | None = node
        while step is not None:
            assert step.locks > 0, "unlock of an unlocked node"
            step.locks -= 1
            step.tick = self._tick
            if step.locks == 0:
                self.num_locked -= len(step.pages)
                self._settle(step, is_oldest=False)
            step = step.parent

    def hold(self, node: RadixNode) -> None:
        """Let the path to `node` be evicted late. Unlike a lock it keeps nobody from the pages that are needed."""
        step: RadixNode | None = node
        while step is not None:
            step.holds += 1
            if step.holds == 1:
                self.num_held += len(step.pages)
                self._relist(step)
            step = step.parent

    def unhold(self, node: RadixNode) -> None:
        """Undo one hold of the path to `node`, which may have left the tree meanwhile."""
        step: RadixNode | None = node
        while step is not None:
            assert step.holds > 0, "the end of a hold that nobody has"
            step.holds -= 1
            if step.holds == 0:
                self.num_held -= len(step.pages)
                self._relist(step)
            step = step.parent

    def insert(self, node: RadixNode, tokens: list[int], pages: list[int], hashes: list[int]) -> tuple[RadixNode, int]:
        """Add a run of whole pages after the end of `node`, which the caller has locked unless it is a root.

        Returns the node that ends the run and the number of leading pages that the tree had already: those stay the
        caller's, all others are the tree's from now on.
        """
        assert len(tokens) == len(pages) * self.page_size and len(hashes) == len(pages), (len(tokens), len(pages))
        match = self._descend(node, tokens, len(tokens))
        known = len(match.pages)
        end = self._end(match)
        if known == len(pages):
            return end, known
        self._emit("stored", hashes[known:])
        self._stored.update(hashes[known:])
        new = RadixNode(end, tokens[known * self.page_size :], pages[known:], hashes[known:])
        self.num_pages += len(new.pages)
        if end is node and node.parent is not None and node.locks == 1 and not node.holds and not node.children:
            self._extend(node, new)  # the caller alone needs this leaf, so its run simply grows
            return node, known
        self._attach(end, new)
        return new, known

    def evict(self, count: int) -> list[int]:
        """Drop the `count` least recently used pages, or all unlocked ones if there are fewer, and return them.

        Leaves go from their ends, oldest leaf first; a parent that becomes a leaf is next in line. Held leaves come
        after all others, but first while there are too many.
        """
        freed: list[int] = []
        while len(freed) < count and (leaf := self._oldest()) is not None:
            excess = self.num_held - self.max_held
            most = min(excess, len(leaf.pages)) if leaf.holds and excess > 0 else len(leaf.pages)
            freed += self._trim(leaf, min(most, count - len(freed)))
        return freed

    def prune(self, node: RadixNode) -> list[int]:
        """Drop `node` and its ancestors as far as nothing else needs them, and return their pages."""
        freed: list[int] = []
        step: RadixNode | None = node
        while step is not None and step.parent is not None and step.locks == 0 and not step.children:
            parent = step.parent
            freed += self._trim(step, len(step.pages))
            step = parent
        return freed

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def hashes(self) -> list[int]:
        """The chained hash of every page in the tree."""
        return list(self._stored)

    def drain_events(self) -> list[CacheEvent]:
        """Changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def restore_events(self, events: list[CacheEvent]) -> None:
        """Put changes in front of those of this tree, when it takes the place of another one."""
        self._events = [*events, *self._events]

    def check(self, holders: Iterable[RadixNode]) -> None:
        """Prove the tree's own rules, given the nodes whose paths are locked, one entry a lock."""
        held = [node for node in self.nodes() if node.holds]
        assert self.num_held == sum(len(node.pages) for node in held), self.num_held
        locks: dict[int, int] = {}
        for holder in holders:
            step: RadixNode | None = holder
            while step is not None:
                locks[id(step)] = locks.get(id(step), 0) + 1
                step = step.parent
        nodes = list(self.nodes())
        for node in nodes:
            self._check_node(node, locks.pop(id(node), 0))
        assert not locks, f"{len(locks)} locked nodes are not in the tree"
        assert self.num_pages == sum(len(node.pages) for node in nodes), self.num_pages
        assert self.num_locked == sum(len(node.pages) for node in nodes if node.locks), self.num_locked
        hashes = [value for node in nodes if node.parent is not None for value in node.hashes]
        assert len(hashes) == len(self._stored) and self._stored.issuperset(hashes), "hashes and pages disagree"
        for ring, is_held in ((self._ring, False), (self._held_ring, True)):
            leaves = {id(node) for node in nodes if self._is_evictable(node) and bool(node.holds) is is_held}
            assert leaves == _linked(ring), "the eviction list is not the set of unlocked leaves"

    def _check_node(self, node: RadixNode, locks: int) -> None:
        assert node.locks == locks, f"a node has {node.locks} locks and {locks} holders"
        assert node.keys == sorted(node.children), "children are not sorted"
        if node.parent is None:
            assert node.locks or node.children, "an empty root was left behind"
            return
        assert node.pages and len(node.tokens) == len(node.pages) * self.page_size == len(node.hashes) * self.page_size
        assert node.parent.children[tuple(node.tokens[: self.page_size])] is node, "a child is not under its key"
        assert node.parent.locks >= node.locks, "a node is locked more often than its parent"
        assert node.parent.holds >= node.holds, "a node is held more often than its parent"

    def _descend(self, node: RadixNode, tokens: list[int], limit: int) -> Match:
        """Follow `tokens[:limit]` below the end of `node`."""
        size = self.page_size
        pages: list[int] = []
        position = 0
        depth = len(node.pages)
        while position + size <= limit:
            child = node.children.get(tuple(tokens[position : position + size]))
            if child is None:
                break
            depth = self._num_common(child, tokens, position, limit)
            pages += child.pages[:depth]
            position += depth * size
            node = child
            if depth < len(child.pages):
                break
        return self._with_tail(node, depth, pages, tuple(tokens[position : min(limit, position + size)]))

    def _num_common(self, node: RadixNode, tokens: list[int], position: int, limit: int) -> int:
        """How many pages of `node`, of which the first is known to agree, agree with the tokens at `position`."""
        size = self.page_size
        most = min(len(node.pages), (limit - position) // size)
        if tokens[position : position + most * size] == node.tokens[: most * size]:
            return most
        low, high = 1, most  # pages below `low` agree, not all below `high` do
        while high - low > 1:
            middle = (low + high) // 2
            if tokens[position + low * size : position + middle * size] == node.tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _with_tail(self, node: RadixNode, depth: int, pages: list[int], rest: Key) -> Match:
        """The match that ends after `depth` pages of `node`, with the page that agrees longest with `rest`."""
        size = self.page_size
        if not rest or size == 1:
            return Match(node, depth, pages)
        if depth < len(node.pages):
            count = _num_equal(rest, tuple(node.tokens[depth * size : (depth + 1) * size]))
            return Match(node, depth, pages, node, node.pages[depth], count) if count else Match(node, depth, pages)
        spot = bisect_left(node.keys, rest)
        best = max(node.keys[max(spot - 1, 0) : spot + 1], key=lambda key: _num_equal(rest, key), default=())
        count = _num_equal(rest, best)
        if count == 0:
            return Match(node, depth, pages)
        child = node.children[best]
        return Match(node, depth, pages, child, child.pages[0], count)

    def _end(self, match: Match) -> RadixNode:
        """The node that ends where the match ends, split off if needed."""
        node, depth = match.node, match.depth
        if depth == len(node.pages):
            return node
        assert node.parent is not None and depth > 0, depth
        cut = depth * self.page_size
        upper = RadixNode(node.parent, node.tokens[:cut], node.pages[:depth], node.hashes[:depth])
        upper.locks, upper.holds, upper.tick = node.locks, node.holds, node.tick
        node.parent.children[tuple(upper.tokens[: self.page_size])] = upper
        del node.tokens[:cut], node.pages[:depth], node.hashes[:depth]
        node.parent = upper
        key = tuple(node.tokens[: self.page_size])
        upper.children[key] = node
        upper.keys.append(key)
        return upper

    def _extend(self, node: RadixNode, new: RadixNode) -> None:
        node.tokens += new.tokens
        node.pages += new.pages
        node.hashes += new.hashes
        self.num_locked += len(new.pages)

    def _attach(self, parent: RadixNode, node: RadixNode) -> None:
        key = tuple(node.tokens[: self.page_size])
        parent.children[key] = node
        insort(parent.keys, key)
        self._unlink(parent)
        self._tick += 1
        node.tick = self._tick
        self._settle(node, is_oldest=False)

    def _trim(self, leaf: RadixNode, count: int) -> list[int]:
        """Take the last `count` pages off an unlocked leaf; an empty leaf leaves the tree."""
        keep = len(leaf.pages) - count
        pages = leaf.pages[keep:]
        key = tuple(leaf.tokens[: self.page_size])
        self._emit("removed", leaf.hashes[keep:])
        self._stored.difference_update(leaf.hashes[keep:])
        del leaf.pages[keep:], leaf.hashes[keep:], leaf.tokens[keep * self.page_size :]
        self.num_pages -= count
        self.num_held -= count if leaf.holds else 0
        if keep == 0:
            self._detach(leaf, key)
        return pages

    def _detach(self, leaf: RadixNode, key: Key) -> None:
        parent = leaf.parent
        assert parent is not None
        self._unlink(leaf)
        del parent.children[key]
        del parent.keys[bisect_left(parent.keys, key)]
        # A parent used apart from this leaf is worth more than the leaf was; else its turn has come as well.
        self._settle(parent, is_oldest=parent.tick <= leaf.tick)

    def _settle(self, node: RadixNode, *, is_oldest: bool) -> None:
        """Enter a node that has just become an unlocked leaf in the eviction list, or drop it if it is a bare root."""
        if node.parent is None:
            if not node.children and node.locks == 0:
                self._roots.pop(node.namespace, None)
        elif self._is_evictable(node):
            ring = self._held_ring if node.holds else self._ring
            before = ring if is_oldest else ring.older
            assert before is not None and before.newer is not None
            node.older, node.newer = before, before.newer
            before.newer.older = node
            before.newer = node

    def _relist(self, node: RadixNode) -> None:
        """Enter a node whose holds began or ended in the other list, if it is in one."""
        if node.older is not None:
            self._unlink(node)
            self._settle(node, is_oldest=False)

    def _oldest(self) -> RadixNode | None:
        """The leaf whose turn it is to be evicted."""
        rings = (self._ring, self._held_ring)
        for ring in rings if self.num_held <= self.max_held else reversed(rings):
            if ring.newer is not ring:
                return ring.newer
        return None

    def _unlink(self, node: RadixNode) -> None:
        if node.older is not None and node.newer is not None:
            node.older.newer, node.newer.older = node.newer, node.older
            node.older = node.newer = None

    @staticmethod
    def _is_evictable(node: RadixNode) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _emit(self, kind: Literal["stored", "removed"], hashes: list[int]) -> None:
        if self._events and self._events[-1].kind == kind:
            self._events[-1].hashes.extend(hashes)
        else:
            self._events.append(CacheEvent(kind, list(hashes)))


def _ring() -> RadixNode:
    """Both ends of an empty list: `newer` is its oldest node."""
    ring = RadixNode(None, [], [], [])
    ring.older = ring.newer = ring
    return ring


def _linked(ring: RadixNode) -> set[int]:
    found = set()
    step = ring.newer
    while step is not None and step is not ring:
        assert step.newer is not None and step.newer.older is step, "the eviction list is torn"
        found.add(id(step))
        step = step.newer
    return found


def _num_equal(left: Key, right: Key) -> int:
    """The length of the common start."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
