"""Which keys several leases have in the same pages: runs of the radix tree that more than one of them holds.

Reads the tree above the leases and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sgray.memory.cache import KVLease
from sgray.memory.radix import RadixNode


def shared_spans(leases: Sequence[KVLease], page_size: int, min_saved: int) -> list[tuple[int, int, list[int]]]:
    """Spans `[begin, end)` of positions, with the leases, by index, that have them in the same pages.

    A span stands behind those before it. Those of one lease follow each other from position 0 without a gap. A run that
    saves less than `min_saved` tokens from being read again goes to the runs below it; one that is held by just those
    that hold a run below it, too.
    """
    holders = _holders(leases)
    below: dict[RadixNode, list[RadixNode]] = defaultdict(list)
    for node, indices in holders.items():
        if len(indices) > 1 and node.parent is not None:
            below[node.parent].append(node)
    spans = []
    todo = [(node, 0, 0) for parent, nodes in below.items() if parent.parent is None for node in nodes]
    while todo:
        node, begin, start = todo.pop()
        end, indices = start + len(node.pages), holders[node]
        goes_on = any(len(holders[inner]) == len(indices) for inner in below[node])
        if not goes_on and (len(indices) - 1) * (end - begin) * page_size >= min_saved:
            spans.append((begin * page_size, end * page_size, indices))
            begin = end
        todo += [(inner, begin, end) for inner in below[node]]
    return spans


def _holders(leases: Sequence[KVLease]) -> dict[RadixNode, list[int]]:
    """Of each run that is locked more than once, which leases lie below it. Those with duplicates of the tree's pages
    read their own."""
    holders: dict[RadixNode, list[int]] = defaultdict(list)
    for index, lease in enumerate(leases):
        node = None if lease.duplicates else lease.node
        while node is not None and node.parent is not None:
            if node.locks > 1:
                holders[node].append(index)
            node = node.parent
    return holders
