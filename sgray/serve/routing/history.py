"""What became of the latest choices of replicas, and which prefixes are asked for most: for people who look on.

It decides nothing, and holds no text and no tokens: a prefix is known by the hash of its last page. Its memory is
bounded, whatever is asked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

MAX_DECISIONS = 4096
MAX_PREFIXES = 512
MAX_DEPTHS = 12  # prefixes of 1, 2, 4, ... pages of a prompt are counted
SAME_SHARE = 0.8  # a prefix of which so many go on with a longer one is not worth a line


@dataclass(slots=True)
class Decision:
    """One choice: when (seconds since 1970), where to, and how many of the prompt's tokens were thought to be cached.

    `cached` is how many were; None until the first token came.
    """

    at: float
    replica: str
    num_tokens: int
    predicted: int
    cached: int | None = None


@dataclass(slots=True)
class Prefix:
    """The first `num_tokens` tokens of some prompts; `parent` is the next shorter prefix that is counted."""

    hash: int
    num_tokens: int
    parent: int | None
    num_requests: int = 0


class History:
    """The latest choices, and counts of prefixes, in one ingress."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._decisions: OrderedDict[str, Decision] = OrderedDict()  # by request, oldest first
        self._prefixes: dict[int, Prefix] = {}

    def placed(self, request_id: str, replica: str, num_tokens: int, predicted: int) -> None:
        """A request goes to a replica, maybe not for the first time."""
        self._decisions.pop(request_id, None)
        self._decisions[request_id] = Decision(self._clock(), replica, num_tokens, predicted)
        if len(self._decisions) > MAX_DECISIONS:
            self._decisions.popitem(last=False)

    def started(self, request_id: str, cached: int) -> None:
        """Its first token came."""
        if (decision := self._decisions.get(request_id)) is not None:
            decision.cached = cached

    def asked(self, hashes: list[int], page_size: int) -> None:
        """A prompt with these whole pages came."""
        depth, parent = 1, None
        for _ in range(MAX_DEPTHS):
            if depth > len(hashes):
                break
            value = hashes[depth - 1]
            prefix = self._prefixes.setdefault(value, Prefix(value, depth * page_size, parent))
            prefix.num_requests += 1
            depth, parent = 2 * depth, value
        if len(self._prefixes) > MAX_PREFIXES:
            self._forget()

    def replica_of(self, request_id: str) -> str | None:
        """Where a request went last; None if that is long ago, or nowhere."""
        decision = self._decisions.get(request_id)
        return None if decision is None else decision.replica

    def recent(self, count: int) -> list[Decision]:
        """The latest choices, the newest first."""
        found: list[Decision] = []
        for decision in reversed(self._decisions.values()):
            if len(found) == count:
                break
            found.append(decision)
        return found

    def hot(self, count: int) -> list[Prefix]:
        """The prefixes by the tokens that requests have had in common there, without those that a longer one says.

        The `parent` of each is the longest shorter one that is told as well.
        """
        shared = [one for one in self._prefixes.values() if one.num_requests > 1]
        longer: dict[int, int] = {}
        for one in shared:
            if one.parent is not None:
                longer[one.parent] = max(longer.get(one.parent, 0), one.num_requests)
        worth = [one for one in shared if longer.get(one.hash, 0) < SAME_SHARE * one.num_requests]
        told = sorted(worth, key=lambda one: (-one.num_requests * one.num_tokens, one.hash))[:count]
        hashes = {one.hash for one in told}
        return [replace(one, parent=self._ancestor(one, hashes)) for one in told]

    def _ancestor(self, prefix: Prefix, among: Set[int]) -> int | None:
        parent = prefix.parent
        while parent is not None and parent not in among:
            above = self._prefixes.get(parent)
            parent = None if above is None else above.parent
        return parent

    def _forget(self) -> None:
        """Drop the rarer half, and halve the counts of the others, so that what was hot once fades."""
        kept = sorted(self._prefixes.values(), key=lambda one: -one.num_requests)[: MAX_PREFIXES // 2]
        for prefix in kept:
            prefix.num_requests = (prefix.num_requests + 1) // 2
        self._prefixes = {prefix.hash: prefix for prefix in kept}
