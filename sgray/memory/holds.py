"""For whom paths of the tree are held: the ends that each holder has, and who was heard of last.

Knows nodes and names; what a holder is, and when it has ended, is told from outside. Bounded: a holder keeps its newest
ends alone, and the holder that was silent longest makes room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgray.memory.radix import RadixNode, RadixTree

MAX_HOLDERS = 4096
MAX_ENDS = 64  # of one holder; whatever they share is held by each of them


@dataclass(slots=True)
class _Ends:
    """What one holder has, oldest first, and when it was heard of."""

    heard: float
    nodes: dict[RadixNode, None] = field(default_factory=dict)


class Holds:
    """Holds on one tree by name. Times are of the caller's clock, in seconds, and never go back."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._holders: dict[str, _Ends] = {}  # the one heard of last stands last

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: str, node: RadixNode, now: float) -> None:
        """Hold the path to `node` for this holder."""
        ends = self._holders.pop(holder, None) or _Ends(now)
        ends.heard = now
        self._holders[holder] = ends
        if node not in ends.nodes:
            ends.nodes[node] = None
            self._tree.hold(node)
        if len(ends.nodes) > MAX_ENDS:
            oldest = next(iter(ends.nodes))
            del ends.nodes[oldest]
            self._tree.unhold(oldest)
        if len(self._holders) > MAX_HOLDERS:
            self.drop(next(iter(self._holders)))

    def drop(self, holder: str) -> None:
        """The holder needs nothing any more; unknown ones are ignored."""
        ends = self._holders.pop(holder, None)
        if ends is not None:
            for node in ends.nodes:
                self._tree.unhold(node)

    def drop_silent(self, since: float) -> None:
        """Drop the holders that were last heard of before `since`."""
        while self._holders and (oldest := next(iter(self._holders.items())))[1].heard < since:
            self.drop(oldest[0])
