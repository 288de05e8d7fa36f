"""The radix tree alone: matching, splitting, locking, evicting, events."""

import random

import pytest

from sgray.memory.radix import Match, RadixNode, RadixTree
from sgray.protocol import chain_hashes, namespace_key, page_hashes

SPACE = namespace_key()


class Tree(RadixTree):
    """A tree with the pages dealt out in order, so that a test names tokens only."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.num_dealt = 0
        self.locked: list[RadixNode] = []

    def put(self, tokens: list[int], namespace: bytes = SPACE) -> list[int]:
        """Insert the whole pages of `tokens`; the pages that were the tree's already."""
        count = len(tokens) // self.page_size
        pages = list(range(self.num_dealt, self.num_dealt + count))
        self.num_dealt += count
        hashes = page_hashes(tokens, self.page_size, namespace)
        _, known = self.insert(self.root(namespace), tokens[: count * self.page_size], pages, hashes)
        self.prove()
        return pages[:known]

    def take(self, tokens: list[int], namespace: bytes = SPACE) -> tuple[Match, RadixNode]:
        match = self.match(tokens, namespace)
        node = self.lock(match)
        self.locked.append(node)
        self.prove()
        return match, node

    def drop(self, node: RadixNode) -> None:
        self.locked.remove(node)
        self.unlock(node)
        self.prove()

    def known(self, tokens: list[int], namespace: bytes = SPACE) -> int:
        return len(self.match(tokens, namespace).pages) * self.page_size

    def prove(self) -> None:
        self.check(self.locked)


def test_pub_094_only_whole_pages_are_kept_and_matched() -> None:
    tree = Tree(4)
    tree.put(list(range(1, 11)))
    assert tree.num_pages * tree.page_size == 8
    assert tree.known([1, 2, 3, 4, 5, 6]) == 4
    assert tree.known([1, 2, 3]) == 0
    assert tree.known([]) == 0
    assert tree.num_evictable == 2


@pytest.mark.parametrize(
    ("tokens", "whole", "tail"),
    [
        ([1, 2, 3, 4, 5, 6], 4, 2),
        ([1, 2, 3], 0, 3),
        ([1, 2, 9], 0, 2),
        ([9], 0, 0),
        ([], 0, 0),
        (list(range(1, 9)), 8, 0),
        ([1, 2, 3, 4, 5, 6, 7, 9, 10], 4, 3),
        (list(range(1, 20)), 8, 0),
    ],
)
def test_a_match_is_exact_to_the_token(tokens: list[int], whole: int, tail: int) -> None:
    tree = Tree(4)
    tree.put(list(range(1, 11)))
    match = tree.match(tokens, SPACE)
    assert (len(match.pages) * 4, match.tail_tokens) == (whole, tail)
    assert match.pages == [0, 1][: whole // 4]
    assert match.tail_page == (whole // 4 if tail else -1)


def test_among_many_children_the_one_that_agrees_longest_is_found() -> None:
    tree = Tree(8)
    rng = random.Random(1)
    pages = [[rng.randrange(3) for _ in range(8)] for _ in range(200)]
    for page in pages:
        tree.put(page)
    for _ in range(300):
        query = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        best = max(
            next((i for i, (a, b) in enumerate(zip(query, p, strict=False)) if a != b), len(query)) for p in pages
        )
        assert tree.match(query, SPACE).tail_tokens == best


def test_a_limit_caps_the_match() -> None:
    tree = Tree(4)
    tree.put(list(range(12)))
    match = tree.match(list(range(12)), SPACE, 7)
    assert (len(match.pages), match.tail_tokens) == (1, 3)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100, 127])
def test_a_long_run_is_compared_to_the_page(length: int) -> None:
    tree = Tree(2)
    tree.put(list(range(256)))
    assert tree.known([*range(2 * length), -1, -1, -1]) == 2 * length


def test_pub_095_a_match_splits_and_only_the_matched_part_is_locked() -> None:
    tree = Tree(1)
    tree.put([1, 2, 3, 4, 5, 6, 7, 8])
    match, node = tree.take([1, 2, 3, 4, 9])
    assert len(match.pages) == 4
    assert (tree.num_locked, tree.num_evictable) == (4, 4)
    assert tree.put([1, 2, 3, 4, 9, 10]) == [8, 9, 10, 11]
    assert (tree.num_locked, tree.num_evictable) == (4, 6)
    tree.drop(node)
    assert len(tree.evict(1000)) == 10
    assert tree.num_pages == 0 and list(tree.nodes()) == []


def test_pub_096_eviction_frees_what_is_asked_and_ends_at_locks() -> None:
    tree = Tree(1)
    for start in (100, 200, 300):
        tree.put([7, *range(start, start + 9)])
    leaves = [[7, *range(start, start + 9)] for start in (100, 200, 300)]
    _, node = tree.take(leaves[2])
    first = tree.evict(5)
    assert len(first) == 5 and tree.known(leaves[0]) == 5
    assert len(tree.evict(1000)) == 13
    assert tree.known(leaves[2]) == 10, "locked tokens and their ancestors stay"
    assert tree.evict(1000) == []
    tree.drop(node)
    assert len(tree.evict(1000)) == 10


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Tree(2)
    for start in (10, 20, 30):
        tree.put([start, start, start + 1, start + 1])
    _, node = tree.take([10, 10, 11, 11])
    tree.drop(node)
    tree.evict(2)
    assert [tree.known([s, s, s + 1, s + 1]) for s in (10, 20, 30)] == [4, 0, 4]
    tree.evict(2)
    assert [tree.known([s, s, s + 1, s + 1]) for s in (10, 20, 30)] == [4, 0, 0]


def test_a_leaf_goes_from_its_end_and_its_head_can_still_be_hit() -> None:
    tree = Tree(2)
    tree.put([1, 1, 2, 2, 3, 3])
    assert tree.evict(1) == [2]
    tree.prove()
    assert tree.known([1, 1, 2, 2, 3, 3]) == 4


def test_a_parent_used_apart_from_its_last_child_outlives_older_leaves() -> None:
    tree = Tree(1)
    tree.put([1, 2])
    tree.put([5, 6])
    _, head = tree.take([1])
    tree.drop(head)
    assert tree.evict(1) == [1]
    tree.prove()
    tree.evict(2)
    assert tree.known([1]) == 1, "5, 6 was older than the last use of 1"


def test_a_lock_on_a_parent_does_not_hold_its_children() -> None:
    tree = Tree(1)
    tree.put([1, 2, 3])
    _, node = tree.take([1])
    assert len(tree.evict(10)) == 2
    assert tree.known([1, 2, 3]) == 1
    tree.drop(node)


def test_a_split_keeps_the_locks_of_those_further_down() -> None:
    tree = Tree(1)
    tree.put([1, 2, 3, 4])
    _, deep = tree.take([1, 2, 3, 4])
    _, high = tree.take([1, 2])
    assert high.locks == 2 and deep.locks == 1
    tree.drop(high)
    assert tree.num_locked == 4 and tree.evict(9) == []
    tree.drop(deep)
    assert len(tree.evict(9)) == 4


def test_unlocking_what_is_not_locked_is_refused() -> None:
    tree = Tree(1)
    tree.put([1])
    _, node = tree.take([1])
    tree.unlock(node)
    with pytest.raises(AssertionError, match="unlock"):
        tree.unlock(node)


def test_the_sole_holder_of_a_leaf_extends_it_in_place() -> None:
    tree = Tree(2)
    tree.put([1, 1])
    _, node = tree.take([1, 1])
    end, known = tree.insert(node, [2, 2], [77], chain_hashes([2, 2], 2, node.hashes[-1]))
    assert end is node and known == 0
    assert tree.num_locked == 2 and tree.match([1, 1, 2, 2], SPACE).pages == [0, 77]
    tree.prove()


def test_a_shared_leaf_gets_a_child_instead() -> None:
    tree = Tree(2)
    tree.put([1, 1])
    _, node = tree.take([1, 1])
    tree.take([1, 1])
    end, _ = tree.insert(node, [2, 2], [77], chain_hashes([2, 2], 2, node.hashes[-1]))
    assert end is not node and end.parent is node
    assert tree.num_locked == 1
    tree.prove()


def test_prune_takes_what_nobody_else_needs() -> None:
    tree = Tree(1)
    tree.put([1, 2, 3])
    tree.put([1, 9])
    _, node = tree.take([1, 2, 3])
    tree.drop(node)
    assert sorted(tree.prune(node)) == [1, 2]
    tree.prove()
    assert tree.known([1, 9]) == 2


def test_namespaces_do_not_meet_and_an_empty_one_is_forgotten() -> None:
    tree = Tree(1)
    other = namespace_key(salt="x")
    tree.put([1, 2])
    tree.put([1, 2, 3], other)
    assert tree.known([1, 2, 3]) == 2 and tree.known([1, 2, 3], other) == 3
    assert len(tree.evict(10)) == 5
    assert list(tree.nodes()) == []
    _, node = tree.take([1], namespace_key(salt="never used"))
    tree.drop(node)
    assert list(tree.nodes()) == []


def test_events_and_hashes_tell_the_same_story() -> None:
    tree = Tree(2)
    tree.put([1, 1, 2, 2])
    tree.put([1, 1, 3, 3, 4, 4])
    tree.evict(2)
    tree.put([8, 8])
    seen: set[int] = set()
    for event in tree.drain_events():
        if event.kind == "stored":
            assert seen.isdisjoint(event.hashes)
            seen.update(event.hashes)
        else:
            assert seen.issuperset(event.hashes)
            seen.difference_update(event.hashes)
    assert seen == set(tree.hashes())
    assert set(page_hashes([8, 8], 2, SPACE)) <= seen
    assert all(tree.has(value) for value in seen) and not tree.has(0)
    assert tree.drain_events() == []


def test_stored_pages_are_named_by_the_chained_hashes_of_the_protocol() -> None:
    tree = Tree(4)
    tokens = list(range(30))
    tree.put(tokens)
    [event] = tree.drain_events()
    assert event.hashes == page_hashes(tokens, 4, SPACE)


def test_leaves_go_in_the_order_of_their_last_use() -> None:
    tree = RadixTree(1)
    for token in range(500):
        tree.insert(tree.root(SPACE), [token], [token], page_hashes([token], 1, SPACE))
    for token in range(0, 500, 2):
        tree.unlock(tree.lock(tree.match([token], SPACE)))
    assert tree.evict(500) == [*range(1, 500, 2), *range(0, 500, 2)]
    tree.check([])
