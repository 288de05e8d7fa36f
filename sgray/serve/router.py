"""Which replica gets a request: what one ingress knows of all replicas, and the policy that it asks.

Pure: no IO, no Ray; the clock is handed in. The picture of a replica's prefix cache is exact (its own events), except
for pages that a request in flight will compute: those count from the moment of choice, so that a burst of siblings
meets in one place. A wrong belief costs a miss, never an error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from sgray.config import RoutingPolicy
from sgray.protocol import CacheEvent, Load
from sgray.serve.routing.choice import make_policy
from sgray.serve.routing.cost import CostModel
from sgray.serve.routing.picture import CachePicture
from sgray.serve.routing.policy import Question
from sgray.serve.routing.replica import ReplicaState, Ticket
from sgray.serve.routing.speeds import SpeedPrior, Speeds
from sgray.serve.routing.watch import Watch, WatchLimits

__all__ = ["CostModel", "PredictionCounters", "Router", "Ticket"]

TRANSFER_S = 0.002  # what a frame is on its way for, at most; a report that comes sooner does not count a booking
RECENT_GROWTH = 1.01  # a booking; of what new work weighs, which is how old work fades
LARGE = 1e100
PEER_FADE = 0.98  # a booking
MAX_PROGRAMS = 4096  # the one that was asked for longest ago is forgotten
MOST_PEERS = 64.0


@dataclass(slots=True)
class PredictionCounters:
    """How good predictions of cached tokens were; sums over all started requests."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted: int = 0
    actual: int = 0
    missed: int = 0  # predicted and not found
    surprises: int = 0  # found and not predicted; the part of a page that a replica copies is always one

    def count(self, ticket: Ticket, cached_tokens: int) -> None:
        """Enter what became of one prediction."""
        self.requests += 1
        self.prompt_tokens += ticket.num_tokens
        self.predicted += ticket.predicted_cached
        self.actual += cached_tokens
        self.missed += max(0, ticket.predicted_cached - cached_tokens)
        self.surprises += max(0, cached_tokens - ticket.predicted_cached)


class Router:
    """Holds memory in the pages that replicas store, in the requests in flight, and in a bounded list of programs."""

    def __init__(
        self,
        page_size: int,
        policy: RoutingPolicy = "cost",
        model: CostModel | None = None,
        *,
        prior: SpeedPrior | None = None,
        limits: WatchLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = PredictionCounters()
        self.speeds = Speeds(prior or SpeedPrior())
        self._page_size = page_size
        self._policy = make_policy(policy, model)
        self._watch = Watch(limits or WatchLimits())
        self._clock = clock
        self._replicas: dict[str, ReplicaState] = {}
        self._picture = CachePicture()
        self._turn = itertools.count()
        self._homes: dict[str, str] = {}  # program -> the replica that it was sent to last
        self._recent_unit = 1.0
        self._own_bookings = 0.0  # both fade with every booking
        self._all_bookings = 0.0

    @property
    def replicas(self) -> list[str]:
        """Those that can be chosen."""
        return list(self._replicas)

    @property
    def num_pages(self) -> int:
        """Different pages in the picture."""
        return len(self._picture)

    @property
    def num_programs(self) -> int:
        """Programs whose home is known."""
        return len(self._homes)

    @property
    def peers(self) -> float:
        """How many routers there seem to be, this one included: all bookings over own ones."""
        if self._own_bookings < 1.0:
            return 1.0
        return min(MOST_PEERS, self._all_bookings / self._own_bookings)

    def loads(self) -> dict[str, Load]:
        """The last reported load of each replica."""
        return {name: replica.load for name, replica in self._replicas.items()}

    def silent(self) -> list[str]:
        """Replicas that owe an answer for too long and are passed over until they speak."""
        now = self._clock()
        return [name for name, replica in self._replicas.items() if self._watch.is_silent(replica, now)]

    def join(self, name: str) -> None:
        """A replica can be chosen from now on; nothing happens if it could already."""
        if name in self._replicas:
            return
        states, now = self._replicas.values(), self._clock()
        used = sum(replica.bit for replica in states)
        number = (~used & (used + 1)).bit_length() - 1
        recent = sum(replica.recent for replica in states) / max(1, len(states))
        new = ReplicaState(name, number, joined=now, heard=now, recent=recent)
        new.is_young = any(now - replica.joined >= self._watch.limits.young_s for replica in states)
        self._replicas[name] = new

    def leave(self, name: str) -> None:
        """Forget a replica; its tickets may still be started and finished."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._picture.disown(replica.bit, replica.stored | replica.promised.keys())

    def replace(self, name: str, hashes: Iterable[int]) -> None:
        """The replica stores exactly these pages."""
        replica = self._replicas[name]
        gone, replica.stored = replica.stored, set(hashes)
        self._picture.disown(replica.bit, gone - replica.stored - replica.promised.keys())
        self._picture.own(replica.bit, replica.stored)

    def apply(self, name: str, events: Iterable[CacheEvent]) -> None:
        """Follow the replica's cache."""
        replica = self._replicas[name]
        for event in events:
            if event.kind == "stored":
                replica.stored.update(event.hashes)
                self._picture.own(replica.bit, event.hashes)
            else:
                gone = set(event.hashes) if event.kind == "removed" else set(replica.stored)
                replica.stored -= gone
                self._picture.disown(replica.bit, gone - replica.promised.keys())

    def report(self, name: str, load: Load) -> None:
        """The replica's newest load. It counts what was sent before its step began."""
        replica, now = self._replicas[name], self._clock()
        before, replica.load, replica.heard = replica.load, load, now
        self.speeds.learn(before, load)
        replica.see_until(now - load.last_step_s - TRANSFER_S)

    def choose(
        self, hashes: list[int], num_tokens: int, *, exclude: Collection[str] = (), program: str = ""
    ) -> Ticket | None:
        """A replica for a prompt of `num_tokens` with these whole pages, or None if all are excluded.

        The choice is booked at once; `finish` must follow. Requests of one `program` go to one replica as long as
        another one would not be better for everybody.
        """
        states: Iterable[ReplicaState] = self._replicas.values()
        if exclude:
            states = [replica for replica in states if replica.name not in exclude]
        if not states:
            return None
        now = self._clock()
        candidates = self._watch.eligible(states, now, self.speeds.prefill_tokens_per_s)
        depths = self._picture.match(hashes, sum(replica.bit for replica in candidates))
        question = Question(
            candidates,
            depths,
            hashes,
            num_tokens,
            self._page_size,
            next(self._turn),
            now,
            self.speeds,
            self.peers,
            program,
            self._homes.get(program, ""),
        )
        chosen = self._policy.choose(question)
        if program:
            self._settle(program, chosen.name)
        return self._book(chosen, question)

    def end_programs(self, programs: Iterable[str]) -> None:
        """Forget where these programs were sent."""
        for program in programs:
            self._homes.pop(program, None)

    def book_peer(self, name: str, request_id: str, num_tokens: int, num_known: int, hashes: list[int]) -> None:
        """Another router has sent a request to this replica, which stores `num_known` pages of its prompt and will
        compute those with these hashes; `finish_peers` must follow. Nothing happens if the replica is not known."""
        replica = self._replicas.get(name)
        if replica is None or request_id in replica.peers:
            return
        num_known += self._picture.match(hashes, replica.bit).get(replica.number, 0)
        cached = max(0, min(num_known * self._page_size, num_tokens - 1))
        ticket = replica.peers[request_id] = Ticket(name, num_tokens, cached, hashes, booked=self._clock())
        self._enter(replica, ticket, hashes)

    def finish_peers(self, name: str, request_ids: Iterable[str]) -> None:
        """Requests are gone from this replica; those that no other router booked are passed over."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        for request_id in request_ids:
            if (ticket := replica.peers.pop(request_id, None)) is not None:
                self.finish(ticket)

    def start(self, ticket: Ticket, cached_tokens: int) -> None:
        """The first delta came: the prompt is computed, `cached_tokens` of it were found."""
        if ticket.has_started:
            return
        ticket.has_started = True
        replica = self._replicas.get(ticket.replica)
        if replica is not None:
            replica.see(ticket)
        self.counters.count(ticket, cached_tokens)

    def finish(self, ticket: Ticket) -> None:
        """The request is gone from the replica, in whatever way. May be called again."""
        replica = self._replicas.get(ticket.replica)
        if replica is not None and ticket in replica.tickets:
            self._picture.disown(replica.bit, replica.cancel(ticket))

    def check(self) -> None:
        """Assert that the index of owners says exactly what the replicas' own records say."""
        expected: dict[int, int] = {}
        for replica in self._replicas.values():
            for page in replica.stored | replica.promised.keys():
                expected[page] = expected.get(page, 0) | replica.bit
            needed = [page for ticket in replica.tickets for page in ticket.hashes]
            assert sum(replica.promised.values()) == len(needed), replica.name
            assert replica.promised.keys() == set(needed), replica.name
            assert replica.unseen.keys() <= replica.tickets, replica.name
            assert set(replica.peers.values()) <= replica.tickets, replica.name
            assert replica.unseen_uncached == sum(ticket.uncached for ticket in replica.unseen), replica.name
            assert replica.unseen_tokens == sum(ticket.num_tokens for ticket in replica.unseen), replica.name
        assert expected == self._picture.as_dict()

    def _settle(self, program: str, home: str) -> None:
        self._homes.pop(program, None)
        self._homes[program] = home
        if len(self._homes) > MAX_PROGRAMS:
            del self._homes[next(iter(self._homes))]

    def _book(self, replica: ReplicaState, question: Question) -> Ticket:
        ticket = Ticket(
            replica.name, question.num_tokens, question.cached(replica), question.hashes, booked=question.now
        )
        self._own_bookings += 1.0
        self._enter(replica, ticket, question.hashes[question.depth(replica) :])
        return ticket

    def _enter(self, replica: ReplicaState, ticket: Ticket, new_hashes: list[int]) -> None:
        """Count a booking and recent work: what is old fades, here because what is new weighs more."""
        replica.book(ticket)
        self._picture.own(replica.bit, new_hashes)
        self._own_bookings *= PEER_FADE
        self._all_bookings = self._all_bookings * PEER_FADE + PEER_FADE
        self._recent_unit *= RECENT_GROWTH
        replica.recent += ticket.uncached * self._recent_unit
        if self._recent_unit > LARGE:
            for other in self._replicas.values():
                other.recent /= self._recent_unit
            self._recent_unit = 1.0
