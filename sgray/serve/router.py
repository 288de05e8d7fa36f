"""Which replica gets a request: the one of least expected cost, given what each stores and has to do.

Pure: no clock, no IO, no Ray. The picture of a replica's prefix cache is exact (its own events), except for pages that
a request in flight will compute: those count from the moment of choice, so that a burst of siblings meets in one place.
A wrong belief costs a miss, never an error.

The cost follows the published idea of routing by marginal delay (Preble, Dynamo's cost function).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from sgray.protocol import CacheEvent, Load

Policy = Literal["cost", "round_robin"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of the cost, in seconds and tokens. Speeds stand in until a replica has measured its own."""

    prefill_tokens_per_s: float = 2000.0
    decode_step_s: float = 0.02
    cache_tax: float = 4.0  # times own prefill: what filling the cache takes from others later
    stall_tax: float = 0.02  # share of own prefill that each running request waits
    decode_weight: float = 0.3
    expected_output: int = 128  # tokens
    base_batch: int = 16  # a decode step costs as much as this many sequences, before the first
    near_s: float = 0.01  # costs closer than this, or than `near_share`, are equal
    near_share: float = 0.03
    bounded_share: float = 1.1  # equals above this multiple of their mean recent work are passed over
    recent_decay: float = 0.99  # of recent work, a choice


@dataclass(eq=False, slots=True)
class Ticket:
    """One choice, alive from `choose` to `finish`."""

    replica: str
    num_tokens: int
    predicted_cached: int
    hashes: list[int]
    has_started: bool = False

    @property
    def uncached(self) -> int:
        """Prompt tokens to compute, as predicted."""
        return self.num_tokens - self.predicted_cached


@dataclass(slots=True)
class PredictionCounters:
    """How good predictions of cached tokens were; sums over all started requests."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted: int = 0
    actual: int = 0
    missed: int = 0  # predicted and not found
    surprises: int = 0  # found and not predicted; the part of a page that a replica copies is always one


@dataclass(frozen=True, slots=True)
class _Speeds:
    prefill_tokens_per_s: float
    decode_sequence_s: float  # what one more sequence adds to a decode step


@dataclass(eq=False, slots=True)
class _Replica:
    name: str
    bit: int
    load: Load = field(default_factory=Load)
    stored: set[int] = field(default_factory=set)
    promised: dict[int, int] = field(default_factory=dict)  # page -> requests in flight that need it
    tickets: set[Ticket] = field(default_factory=set)
    pending: int = 0  # uncached tokens of the tickets that have not started
    recent: float = 0.0  # uncached tokens given to it, decaying


class Router:
    """What one ingress knows of all replicas, and its choice."""

    def __init__(self, page_size: int, policy: Policy = "cost", model: CostModel | None = None) -> None:
        self.counters = PredictionCounters()
        self._page_size = page_size
        self._policy = policy
        self._model = model or CostModel()
        self._replicas: dict[str, _Replica] = {}
        self._owners: dict[int, int] = {}  # page -> bits of the replicas that store it or will
        self._turn = itertools.count()

    @property
    def replicas(self) -> list[str]:
        """Those that can be chosen."""
        return list(self._replicas)

    def loads(self) -> dict[str, Load]:
        """The last reported load of each replica."""
        return {name: replica.load for name, replica in self._replicas.items()}

    def join(self, name: str) -> None:
        """A replica can be chosen from now on; nothing happens if it could already."""
        if name not in self._replicas:
            used = sum(replica.bit for replica in self._replicas.values())
            recent = sum(replica.recent for replica in self._replicas.values()) / max(1, len(self._replicas))
            self._replicas[name] = _Replica(name, ~used & (used + 1), recent=recent)

    def leave(self, name: str) -> None:
        """Forget a replica; its tickets may still be started and finished."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._disown(replica, replica.stored | replica.promised.keys())

    def replace(self, name: str, hashes: Iterable[int]) -> None:
        """The replica stores exactly these pages."""
        replica = self._replicas[name]
        gone, replica.stored = replica.stored, set(hashes)
        self._disown(replica, gone - replica.stored - replica.promised.keys())
        self._own(replica, replica.stored)

    def apply(self, name: str, events: Iterable[CacheEvent]) -> None:
        """Follow the replica's cache."""
        replica = self._replicas[name]
        for event in events:
            if event.kind == "stored":
                replica.stored.update(event.hashes)
                self._own(replica, event.hashes)
            else:
                gone = set(event.hashes) if event.kind == "removed" else set(replica.stored)
                replica.stored -= gone
                self._disown(replica, gone - replica.promised.keys())

    def report(self, name: str, load: Load) -> None:
        """The replica's newest load."""
        self._replicas[name].load = load

    def choose(self, hashes: list[int], num_tokens: int, *, exclude: Collection[str] = ()) -> Ticket | None:
        """A replica for a prompt of `num_tokens` with these whole pages, or None if all are excluded.

        The choice is booked at once; `finish` must follow. Takes O(pages + replicas).
        """
        candidates = [replica for name, replica in self._replicas.items() if name not in exclude]
        if not candidates:
            return None
        turn = next(self._turn)
        depths = self._match(hashes, candidates)
        if self._policy == "round_robin":
            chosen = sorted(candidates, key=lambda replica: replica.name)[turn % len(candidates)]
        else:
            chosen = self._cheapest(candidates, depths, hashes, num_tokens, turn)
        return self._book(chosen, depths[chosen.name], hashes, num_tokens)

    def start(self, ticket: Ticket, cached_tokens: int) -> None:
        """The first delta came: the prompt is computed, `cached_tokens` of it were found."""
        if ticket.has_started:
            return
        ticket.has_started = True
        replica = self._replicas.get(ticket.replica)
        if replica is not None and ticket in replica.tickets:
            replica.pending -= ticket.uncached
        counters = self.counters
        counters.requests += 1
        counters.prompt_tokens += ticket.num_tokens
        counters.predicted += ticket.predicted_cached
        counters.actual += cached_tokens
        counters.missed += max(0, ticket.predicted_cached - cached_tokens)
        counters.surprises += max(0, cached_tokens - ticket.predicted_cached)

    def finish(self, ticket: Ticket) -> None:
        """The request is gone from the replica, in whatever way. May be called again."""
        replica = self._replicas.get(ticket.replica)
        if replica is None or ticket not in replica.tickets:
            return
        replica.tickets.discard(ticket)
        if not ticket.has_started:
            replica.pending -= ticket.uncached
        broken: list[int] = []
        for page in ticket.hashes:
            count = replica.promised[page] - 1
            if count:
                replica.promised[page] = count
            else:
                del replica.promised[page]
                if page not in replica.stored:
                    broken.append(page)
        self._disown(replica, broken)

    def check(self) -> None:
        """Assert that the index of owners says exactly what the replicas' own records say."""
        expected: dict[int, int] = {}
        for replica in self._replicas.values():
            for page in replica.stored | replica.promised.keys():
                expected[page] = expected.get(page, 0) | replica.bit
            needed = [page for ticket in replica.tickets for page in ticket.hashes]
            assert sum(replica.promised.values()) == len(needed), replica.name
            assert replica.promised.keys() == set(needed), replica.name
            waiting = [ticket.uncached for ticket in replica.tickets if not ticket.has_started]
            assert replica.pending == sum(waiting), replica.name
        assert expected == self._owners

    def _match(self, hashes: list[int], candidates: list[_Replica]) -> dict[str, int]:
        """How many leading pages each candidate stores or will."""
        depths = dict.fromkeys((replica.name for replica in candidates), len(hashes))
        alive = sum(replica.bit for replica in candidates)
        for depth, page in enumerate(hashes):
            left = alive & self._owners.get(page, 0)
            if left != alive:
                depths.update((replica.name, depth) for replica in candidates if replica.bit & alive & ~left)
                alive = left
                if not alive:
                    break
        return depths

    def _cheapest(
        self, candidates: list[_Replica], depths: dict[str, int], hashes: list[int], num_tokens: int, turn: int
    ) -> _Replica:
        speeds = self._speeds()
        costs = {
            replica.name: self._cost(replica, speeds, num_tokens - self._cached(depths[replica.name], num_tokens))
            for replica in candidates
        }
        least = min(costs.values())
        limit = least + max(self._model.near_s, self._model.near_share * least)
        near = [replica for replica in candidates if costs[replica.name] <= limit]
        depth = max(depths[replica.name] for replica in near)
        equal = [replica for replica in near if depths[replica.name] == depth]
        # Independent ingresses agree on the home of a cold prefix; prompts without a page have no home.
        page = hashes[min(depth, len(hashes) - 1)] if hashes else turn
        return max(self._not_ahead(equal), key=lambda replica: _rendezvous(page, replica.name))

    def _not_ahead(self, equal: list[_Replica]) -> list[_Replica]:
        """Those that did not get clearly more work than the others lately; never empty."""
        mean = sum(replica.recent for replica in equal) / len(equal)
        return [replica for replica in equal if replica.recent <= self._model.bounded_share * mean]

    def _speeds(self) -> _Speeds:
        """The best that any replica measured: they are alike, and a short measurement only ever looks slow."""
        model = self._model
        loads = [replica.load for replica in self._replicas.values()]
        prefill = max(load.prefill_tokens_per_s for load in loads)
        shares = [load.decode_step_s / (model.base_batch + load.running) for load in loads if load.decode_step_s]
        return _Speeds(
            prefill or model.prefill_tokens_per_s, min(shares, default=model.decode_step_s / model.base_batch)
        )

    def _cost(self, replica: _Replica, speeds: _Speeds, uncached: int) -> float:
        """Seconds: waiting for what is ahead, own prefill, and the delay of all by one more decode."""
        model, load = self._model, replica.load
        ahead = max(load.waiting_tokens, replica.pending)
        others = max(load.running + load.waiting, len(replica.tickets))
        own_s = uncached / speeds.prefill_tokens_per_s
        decode_s = model.decode_weight * model.expected_output * 2 * others * speeds.decode_sequence_s
        wait_s = ahead / speeds.prefill_tokens_per_s
        return wait_s + (1 + model.cache_tax + model.stall_tax * others) * own_s + decode_s

    def _cached(self, depth: int, num_tokens: int) -> int:
        """Tokens that `depth` pages save; the last prompt token is always computed."""
        return max(0, min(depth * self._page_size, num_tokens - 1))

    def _book(self, replica: _Replica, depth: int, hashes: list[int], num_tokens: int) -> Ticket:
        ticket = Ticket(replica.name, num_tokens, self._cached(depth, num_tokens), hashes)
        replica.tickets.add(ticket)
        replica.pending += ticket.uncached
        for other in self._replicas.values():
            other.recent *= self._model.recent_decay
        replica.recent += ticket.uncached
        for page in hashes:
            replica.promised[page] = replica.promised.get(page, 0) + 1
        self._own(replica, hashes)
        return ticket

    def _own(self, replica: _Replica, pages: Iterable[int]) -> None:
        for page in pages:
            self._owners[page] = self._owners.get(page, 0) | replica.bit

    def _disown(self, replica: _Replica, pages: Iterable[int]) -> None:
        for page in pages:
            left = self._owners.get(page, 0) & ~replica.bit
            if left:
                self._owners[page] = left
            else:
                self._owners.pop(page, None)


def _rendezvous(page: int, name: str) -> int:
    digest = hashlib.blake2b(page.to_bytes(8, "little") + name.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
