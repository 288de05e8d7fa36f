"""The discrete events between ingresses and replicas: a clock of numbers, messages that take time, replicas that die.

Everything that is random is drawn from one seed, and events of one moment happen in the order in which they were
planned, so a simulation can be repeated exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sgray.bench.route.arrivals import BLOCK, Arrival
from sgray.bench.route.replica import EngineReplica, Replica
from sgray.bench.route.timing import Size, Timing
from sgray.config import RoutingPolicy
from sgray.protocol import CacheEvent, Delta, Load, Request, SamplingParams, StepReport, namespace_key, page_hashes
from sgray.serve.router import CostModel, Router, Ticket

NAMESPACE = namespace_key()
RETRY_S = 1.0  # where no replica is there
DOWN_S = 10.0  # until a replica that died is replaced

MakeReplica = Callable[[Timing, Size, Callable[[], float]], Replica]


@dataclass(frozen=True, slots=True)
class World:
    """What is simulated around the requests.

    `loss` is the share of step frames whose events and load do not reach an ingress (late knowledge is all that is
    lost), and of messages about requests of other ingresses; every `churn_s` seconds a replica dies and an empty one
    follows.
    """

    policy: RoutingPolicy = "cost"
    num_replicas: int = 8
    num_ingresses: int = 1
    delay_s: float = 0.001
    loss: float = 0.0
    churn_s: float | None = None
    seed: int = 0
    timing: Timing = field(default_factory=Timing)
    size: Size = field(default_factory=Size)
    model: CostModel | None = None
    make_replica: MakeReplica = EngineReplica


@dataclass(eq=False, slots=True)
class Outcome:
    """What became of one request; times in seconds of the simulation."""

    arrival: Arrival
    came: float
    first: float | None = None
    finished: float | None = None
    cached: int = 0  # tokens of the workload
    is_lost: bool = False  # its replica died after the first token

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return None if self.first is None else self.first - self.came

    @property
    def tpot_s(self) -> float:
        """A token after the first one; 0 if there is none."""
        if self.first is None or self.finished is None or self.arrival.num_output < 2:
            return 0.0
        return (self.finished - self.first) / (self.arrival.num_output - 1)


@dataclass(eq=False, slots=True)
class _Flight:
    outcome: Outcome
    request: Request
    hashes: list[int]
    ticket: Ticket | None = None


@dataclass(eq=False, slots=True)
class _Seat:
    """A replica in its place: its own name for each life, and what it has told so far."""

    name: str
    replica: Replica
    is_busy: bool = False
    is_alive: bool = True
    sequence: int = 0
    owners: dict[str, _Ingress] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Ingress:
    router: Router
    flights: dict[str, _Flight] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)  # seat name -> sequence of the picture; absent: out of step


class Simulation:
    """One run. `outcomes` are complete after `run`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self.decisions_s: list[float] = []  # of the processor
        self._rng = random.Random(world.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ids = itertools.count()
        self._lives = itertools.count()
        self._open = 0
        self._ingresses = [self._ingress() for _ in range(world.num_ingresses)]
        self._seats: list[_Seat] = []
        self._gone: list[_Seat] = []
        for _ in range(world.num_replicas):
            self._add_seat()

    @property
    def routers(self) -> list[Router]:
        """One for each ingress."""
        return [ingress.router for ingress in self._ingresses]

    @property
    def computed(self) -> list[int]:
        """Prompt tokens that each replica computed, those that died included."""
        return [seat.replica.computed * self.world.size.grain for seat in [*self._seats, *self._gone]]

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Play all arrivals to their ends."""
        self._open = len(arrivals)
        for one in arrivals:
            self._at(one.time, lambda one=one: self._arrive(one))  # type: ignore[misc]
        if self.world.churn_s is not None:
            self._at(self.world.churn_s, self._churn)
        while self._open and self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.outcomes

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), happen))

    def _later(self, happen: Callable[[], None]) -> None:
        self._at(self.now + self.world.delay_s, happen)

    def _clock(self) -> float:
        return self.now

    def _ingress(self) -> _Ingress:
        world = self.world
        return _Ingress(Router(BLOCK // world.size.grain, world.policy, world.model, clock=self._clock))

    # ---- replicas come and go

    def _add_seat(self) -> None:
        world = self.world
        seat = _Seat(f"replica-{next(self._lives)}", world.make_replica(world.timing, world.size, self._clock))
        self._seats.append(seat)
        for ingress in self._ingresses:
            ingress.router.join(seat.name)
            ingress.known[seat.name] = 0

    def _churn(self) -> None:
        assert self.world.churn_s is not None
        self._at(self.now + self.world.churn_s, self._churn)
        if len(self._seats) < 2:
            return
        seat = self._seats.pop(self._rng.randrange(len(self._seats)))
        seat.is_alive = False
        self._gone.append(seat)
        for ingress in self._ingresses:
            ingress.router.leave(seat.name)
            ingress.known.pop(seat.name, None)
        for name, ingress in seat.owners.items():
            self._lose(ingress, ingress.flights.pop(name))
        self._at(self.now + DOWN_S, self._add_seat)

    def _lose(self, ingress: _Ingress, flight: _Flight) -> None:
        """As the dispatcher does it: what has not begun is placed again, what has is lost."""
        assert flight.ticket is not None
        ingress.router.finish(flight.ticket)
        if flight.outcome.first is None:
            self._place(ingress, flight)
        else:
            flight.outcome.is_lost = True
            self._close(flight.outcome)

    # ---- requests

    def _arrive(self, arrival: Arrival) -> None:
        grain = self.world.size.grain
        outcome = Outcome(arrival, self.now)
        self.outcomes.append(outcome)
        tokens = arrival.prompt(grain)
        output = 1 - (1 - arrival.num_output) // grain  # the first token, then whole grains
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True)
        request = Request(str(next(self._ids)), tokens, sampling)
        hashes = page_hashes(tokens, BLOCK // grain, NAMESPACE)
        ingress = self._ingresses[self._rng.randrange(len(self._ingresses))]
        self._place(ingress, _Flight(outcome, request, hashes))

    def _place(self, ingress: _Ingress, flight: _Flight) -> None:
        begin = time.thread_time()
        ticket = ingress.router.choose(flight.hashes, len(flight.request.tokens))
        self.decisions_s.append(time.thread_time() - begin)
        if ticket is None:
            self._at(self.now + RETRY_S, lambda: self._place(ingress, flight))
            return
        flight.ticket = ticket
        ingress.flights[flight.request.id] = flight
        seat = next(seat for seat in self._seats if seat.name == ticket.replica)
        seat.owners[flight.request.id] = ingress
        self._later(lambda: self._submit(seat, flight))

    def _submit(self, seat: _Seat, flight: _Flight) -> None:
        if not seat.is_alive:
            return
        request = flight.request
        seat.replica.submit(request)
        for ingress in self._ingresses:
            if ingress is not seat.owners[request.id] and not self._drops():
                self._later(lambda ingress=ingress: self._tell_booked(ingress, seat, flight))  # type: ignore[misc]
        if not seat.is_busy:
            self._begin(seat)

    def _tell_booked(self, ingress: _Ingress, seat: _Seat, flight: _Flight) -> None:
        request = flight.request
        if request.id in seat.owners:
            ingress.router.book_peer(seat.name, request.id, len(request.tokens), 0, flight.hashes)

    def _close(self, outcome: Outcome) -> None:
        self._open -= 1
        then = outcome.arrival.then
        if then is not None:
            self._open += 1
            self._at(self.now + outcome.arrival.gap_s, lambda: self._arrive(then))

    # ---- steps and what is told of them

    def _begin(self, seat: _Seat) -> None:
        seconds = seat.replica.begin()
        seat.is_busy = seconds is not None
        if seconds is not None:
            self._at(self.now + seconds, lambda: self._end(seat))

    def _end(self, seat: _Seat) -> None:
        if not seat.is_alive:
            return
        report = seat.replica.end()
        if report.events:
            seat.sequence += 1
        sequence = seat.sequence
        self._later(lambda: self._tell(seat, sequence, report))
        self._begin(seat)

    def _tell(self, seat: _Seat, sequence: int, report: StepReport) -> None:
        if not seat.is_alive:
            return
        for ingress in self._ingresses:
            if not self._drops():
                self._follow(ingress, seat, sequence, report.events, report.load)
        for delta in report.deltas:
            self._receive(seat, delta)
        ended = [delta.id for delta in report.deltas if delta.finish is not None]
        for ingress in self._ingresses:
            ingress.router.finish_peers(seat.name, ended)

    def _drops(self) -> bool:
        """Whether this message does not arrive."""
        return bool(self.world.loss) and self._rng.random() < self.world.loss

    def _follow(self, ingress: _Ingress, seat: _Seat, sequence: int, events: list[CacheEvent], load: Load) -> None:
        """As the link does it: after a gap the picture stands still until a snapshot has come."""
        known = ingress.known.get(seat.name)
        if known is not None:
            if sequence != known + (1 if events else 0):
                del ingress.known[seat.name]
                self._later(lambda: self._send_snapshot(ingress, seat))
            else:
                ingress.known[seat.name] = sequence
                if events:
                    ingress.router.apply(seat.name, events)
        ingress.router.report(seat.name, load)

    def _send_snapshot(self, ingress: _Ingress, seat: _Seat) -> None:
        hashes, sequence = seat.replica.snapshot(), seat.sequence
        self._later(lambda: self._take_snapshot(ingress, seat, sequence, hashes))

    def _take_snapshot(self, ingress: _Ingress, seat: _Seat, sequence: int, hashes: list[int]) -> None:
        if seat.is_alive:
            ingress.router.replace(seat.name, hashes)
            ingress.known[seat.name] = sequence

    def _receive(self, seat: _Seat, delta: Delta) -> None:
        ingress = seat.owners[delta.id]
        flight = ingress.flights[delta.id]
        outcome, ticket = flight.outcome, flight.ticket
        assert ticket is not None
        if outcome.first is None:
            outcome.first = self.now
            outcome.cached = (delta.cached_tokens or 0) * self.world.size.grain
            ingress.router.start(ticket, delta.cached_tokens or 0)
        if delta.finish is not None:
            outcome.finished = self.now
            ingress.router.finish(ticket)
            del ingress.flights[delta.id], seat.owners[delta.id]
            self._close(outcome)
