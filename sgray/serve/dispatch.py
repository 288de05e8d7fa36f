"""The backend of an ingress: sends each request to a replica over its link, and goes on at another one if that is lost.

Runs on one event loop; knows nothing of Ray: the replica table is told to it, and `wake` asks for a replica where there
is none.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sgray.config import RoutingPolicy
from sgray.errors import (
    ContextLengthError,
    DeviceLostError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
    ReplicaDrainingError,
    ReplicaLostError,
    RequestTimeoutError,
    RequestTooLargeError,
    SgrayError,
)
from sgray.protocol import CacheEvent, Delta, EngineInfo, ErrorInfo, Finish, Load, Request, namespace_key, page_hashes
from sgray.serve.call_names import is_of_call
from sgray.serve.frames import LinkLimits
from sgray.serve.link import Booked, ReplicaLink
from sgray.serve.moves import Journey
from sgray.serve.router import PredictionCounters, Router, Ticket
from sgray.serve.routing.history import History
from sgray.serve.table import Endpoint

logger = logging.getLogger(__name__)

SILENT_BEATS = 5  # a second each; a replica's link beats whatever its engine computes


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """How long and how often a request looks for a replica."""

    wait_for_replica_s: float = 300.0
    max_moves: int = 2  # what was lost with so many replicas and one more may be what kills them
    first_reconnect_s: float = 0.05
    last_reconnect_s: float = 1.0
    flush_s: float = 30.0  # a flush waits for the end of a step


class Watcher(Protocol):
    """Who wants to know where traced requests go."""

    def placed(self, request: Request, replica: str, predicted_cached: int) -> None:
        """A request goes to a replica, maybe not for the first time."""

    def came_back(self, request: Request, replica: str, error: SgrayError) -> None:
        """A replica did not take it, or lost it."""


class Dispatcher:
    """Implements the backend that the HTTP side asks for. Make it on the event loop that uses it."""

    def __init__(
        self,
        *,
        policy: RoutingPolicy = "cost",
        uses_cache: bool = True,
        random_seed: int | None = None,
        wake: Callable[[], None] = lambda: None,
        limits: DispatchLimits | None = None,
        link_limits: LinkLimits | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._watcher = watcher
        self._policy = policy
        self._uses_cache = uses_cache
        self._wake = wake
        self._limits = limits or DispatchLimits()
        self._link_limits = link_limits or LinkLimits(dead_after_beats=SILENT_BEATS)
        self._random = random.Random(random_seed)
        self._members: dict[str, _Member] = {}
        self._retired: set[_Member] = set()  # as long as they have streams
        self._unplaced: set[Journey] = set()
        self._router: Router | None = None  # needs the page size, which the first replica tells
        self._info: EngineInfo | None = None
        self.history = History()
        self._joined = asyncio.Event()
        self._last_hashes: tuple[list[int], str, list[int]] = ([], "", [])

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine; raises OverloadedError before the first replica was seen."""
        if self._info is None:
            self._wake()
            raise OverloadedError("no engine replica is up yet; try again soon")
        return self._info

    def ready(self) -> bool:
        """Whether a replica can take work now."""
        return self._router is not None and bool(self._router.replicas)

    def loads(self) -> Mapping[str, Load]:
        """The last load of each replica that is connected."""
        return self._router.loads() if self._router is not None else {}

    @property
    def predictions(self) -> PredictionCounters:
        """How well cached tokens were predicted so far."""
        return self._router.counters if self._router is not None else PredictionCounters()

    def set_replicas(self, endpoints: Mapping[str, Endpoint]) -> None:
        """These are the replicas now. One that left gets no new request; its streams go on while it lasts."""
        for name in [name for name, member in self._members.items() if endpoints.get(name) != member.endpoint]:
            member = self._members.pop(name)
            self._retired.add(member)
            member.retire()
        for name, endpoint in endpoints.items():
            if name not in self._members:
                self._members[name] = _Member(self, name, endpoint, self._link_limits)

    async def wait_known(self) -> None:
        """Return once `info` is known; raises OverloadedError if no replica comes in time."""
        deadline = self._now() + self._limits.wait_for_replica_s
        while self._info is None:
            await self._wait_for_replica(deadline)

    async def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The deltas of a request. Closing the generator aborts it. Raises SgrayError where there is no answer."""
        journey = Journey(request, self._random.getrandbits(63))
        busy: dict[str, OverloadedError] = {}
        while True:
            place = await self._place(journey, busy)
            if place is None:
                yield Delta(request.id, finish=Finish("abort"))
                return
            member, ticket = place
            link, stream = member.link, _Stream()
            try:
                link.submit(journey.request, stream.put, ticket.hashes)
                while True:
                    if not stream.has_any:
                        await stream.arrival()
                    delta = stream.take()
                    if delta.finish is not None and delta.finish.error is not None:
                        error = _as_error(delta.finish.error)
                        break
                    if not ticket.has_started:
                        assert self._router is not None
                        self._router.start(ticket, delta.cached_tokens or 0)
                        self.history.started(journey.request.id, delta.cached_tokens or 0)
                    yield journey.take(delta, link.info)
                    if delta.finish is not None:
                        return
            finally:
                self._settle(member, link, ticket, journey.request)
            if isinstance(error, (ReplicaLostError, DeviceLostError)) and member.link is link:
                member.shut()
            self._go_on(journey, member, error, busy)

    def abort_calls(self, name: str | None) -> None:
        """Stop the calls of this name at all replicas, or all calls; those also of other ingresses."""
        for member in (*self._members.values(), *self._retired):
            member.link.abort_calls(name)
        for journey in self._unplaced:
            journey.is_aborted |= name is None or is_of_call(journey.request.id, name)
        self._joined.set()

    def end_programs(self, programs: Sequence[str]) -> None:
        """Tell all replicas that these programs have ended; any of them may hold something for one."""
        for member in self._members.values():
            member.link.end_programs(programs)
        if self._router is not None:
            self._router.end_programs(programs)

    async def flush(self) -> list[str]:
        """Empty the prefix cache of every connected replica; the names of those where that was not possible."""
        connected = self._router.replicas if self._router is not None else ()
        links = {name: self._members[name].link for name in connected}
        limit_s = self._limits.flush_s
        answers = await asyncio.gather(
            *(asyncio.wait_for(link.flush(), limit_s) for link in links.values()), return_exceptions=True
        )
        return [name for name, answer in zip(links, answers, strict=True) if answer is not True]

    async def close(self) -> None:
        """Close all links; running streams get an error."""
        for member in (*self._members.values(), *self._retired):
            member.retire()
            member.link.close()
        self._members.clear()
        self._retired.clear()

    def _go_on(self, journey: Journey, member: _Member, error: SgrayError, busy: dict[str, OverloadedError]) -> None:
        """Prepare for the next replica after this error, or raise it."""
        if self._watcher is not None and journey.request.trace_headers:
            self._watcher.came_back(journey.request, member.name, error)
        if isinstance(error, OverloadedError) and not journey.has_begun:
            busy[member.name] = error
        elif isinstance(error, (ReplicaLostError, DeviceLostError)):
            if isinstance(error, ReplicaDrainingError):
                return
            if journey.num_moves >= self._limits.max_moves:
                logger.warning("request %s is given up: %s", journey.request.id, error)
                raise ReplicaLostError(
                    f"{journey.num_moves + 1} replicas were lost while they worked on this request; "
                    "send the request again"
                )
            journey.move()
            logger.info("request %s goes on elsewhere: %s", journey.request.id, error)
        else:
            raise error

    async def _place(self, journey: Journey, busy: Mapping[str, OverloadedError]) -> tuple[_Member, Ticket] | None:
        """Choose a replica and book the choice, without giving up the loop if one is there; None if it is aborted."""
        self._unplaced.add(journey)
        try:
            return await self._placed(journey, busy)
        finally:
            self._unplaced.discard(journey)

    async def _placed(self, journey: Journey, busy: Mapping[str, OverloadedError]) -> tuple[_Member, Ticket] | None:
        deadline = self._now() + self._limits.wait_for_replica_s
        request = journey.request
        while not journey.is_aborted:
            if self._router is not None:
                hashes = self._hashes(request)
                exclude = {*busy, *(self._strangers(journey) if journey.num_moves else ())}
                ticket = self._router.choose(hashes, len(request.tokens), exclude=exclude, program=request.program)
                if ticket is not None:
                    self.history.asked(hashes, self.info.page_size)
                    self.history.placed(request.id, ticket.replica, ticket.num_tokens, ticket.predicted_cached)
                    if self._watcher is not None and request.trace_headers:
                        self._watcher.placed(request, ticket.replica, ticket.predicted_cached)
                    return self._members[ticket.replica], ticket
                if not busy.keys().isdisjoint(self._router.replicas):
                    raise _all_busy(list(busy.values()))
            await self._wait_for_replica(deadline)
        return None

    def _strangers(self, journey: Journey) -> set[str]:
        """Replicas of another model, as in a deployment that replaces one by another."""
        return {name for name, member in self._members.items() if member.is_open and not journey.fits(member.link.info)}

    def _settle(self, member: _Member, link: ReplicaLink, ticket: Ticket, request: Request) -> None:
        """Whatever happened to the request: nothing of it is left on this side or the other."""
        link.abort(request.id)
        assert self._router is not None
        self._router.finish(ticket)
        member.close_if_done()

    def _hashes(self, request: Request) -> list[int]:
        """Page hashes of the prompt; the siblings of one call share a list of tokens and are hashed once."""
        if not self._uses_cache:
            return []
        tokens, salt, hashes = self._last_hashes
        if tokens is not request.tokens or salt != request.salt or not hashes:
            hashes = page_hashes(request.tokens, self.info.page_size, namespace_key(salt=request.salt))
            self._last_hashes = (request.tokens, request.salt, hashes)
        return hashes

    async def _wait_for_replica(self, deadline: float) -> None:
        self._wake()
        self._joined.clear()
        try:
            await asyncio.wait_for(self._joined.wait(), max(0.0, deadline - self._now()))
        except asyncio.TimeoutError:
            raise OverloadedError("no engine replica is running; try again later") from None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # What members call.

    def _join(self, member: _Member) -> Router:
        self._info = member.link.info
        if self._router is None:
            self._router = Router(self._info.page_size, self._policy)
        if self._members.get(member.name) is member:
            self._router.join(member.name)
            self._joined.set()
        return self._router

    def _leave(self, member: _Member) -> None:
        if self._router is not None and self._members.get(member.name, member) is member:
            self._router.leave(member.name)


class _Member:
    """One replica of the table: keeps a link to it open, and the router's picture of it current."""

    def __init__(self, dispatcher: Dispatcher, name: str, endpoint: Endpoint, limits: LinkLimits) -> None:
        self.name = name
        self.endpoint = endpoint
        self.link = ReplicaLink(self, limits)
        self._dispatcher = dispatcher
        self._limits = limits
        self._router: Router | None = None  # while this replica can be chosen
        self._is_retired = False
        self._is_shut = False
        self._task = asyncio.get_running_loop().create_task(self._connect(delay_s=0.0))

    def retire(self) -> None:
        """Take no new request; close the link after the last stream."""
        self._is_retired = True
        self._task.cancel()
        self._leave()
        self.close_if_done()

    @property
    def is_open(self) -> bool:
        """Whether the replica can be chosen."""
        return self._router is not None

    def shut(self) -> None:
        """Take no new request over this link, which stays for those that it has."""
        self._is_shut = True
        self._leave()

    def close_if_done(self) -> None:
        """Close the link of a retired replica without streams."""
        if self._is_retired and not self.link.num_streams:
            self._dispatcher._retired.discard(self)
            self.link.close()

    def on_snapshot(self, hashes: list[int]) -> None:
        """Called by the link; after the first one the replica can be chosen."""
        if not self._is_retired and not self._is_shut:
            self._router = self._dispatcher._join(self)
            self._router.replace(self.name, hashes)

    def on_events(self, events: list[CacheEvent]) -> None:
        """Called by the link."""
        if self._router is not None:
            self._router.apply(self.name, events)

    def on_load(self, load: Load) -> None:
        """Called by the link."""
        if self._router is not None:
            self._router.report(self.name, load)

    def on_booked(self, booked: Booked) -> None:
        """Called by the link."""
        if self._router is not None:
            self._router.book_peer(self.name, booked.id, booked.num_tokens, booked.num_known, booked.hashes)

    def on_ended(self, request_ids: list[str]) -> None:
        """Called by the link."""
        if self._router is not None:
            self._router.finish_peers(self.name, request_ids)

    def on_draining(self) -> None:
        """Called by the link."""
        self.shut()

    def on_lost(self, reason: str) -> None:
        """Called by the link: connect again as long as Serve says that the replica is there."""
        self._leave()
        if not self._is_retired:
            logger.warning("the link to replica %s is lost: %s", self.name, reason)
            first_s = self._dispatcher._limits.first_reconnect_s
            self._task = asyncio.get_running_loop().create_task(self._connect(delay_s=first_s))

    def _leave(self) -> None:
        if self._router is not None:
            self._router = None
            self._dispatcher._leave(self)

    async def _connect(self, delay_s: float) -> None:
        limits = self._dispatcher._limits
        while True:
            await asyncio.sleep(delay_s)
            self.link = ReplicaLink(self, self._limits)
            self._is_shut = False
            try:
                await self.link.open(self.endpoint.host, self.endpoint.port, self.endpoint.token)
            except (OSError, ReplicaLostError) as error:
                logger.info("replica %s cannot be reached: %s", self.name, error)
                delay_s = min(limits.last_reconnect_s, max(limits.first_reconnect_s, 2 * delay_s))
            else:
                return


class _Stream:
    """The deltas of one request that are not read yet. A slow reader gets them merged, so it holds only tokens."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_any(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._waiting)

    def put(self, delta: Delta) -> None:
        """Called by the link."""
        self._waiting.append(delta)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # it is done where the reader was cancelled
            reader.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Done with the next delta. For one reader; a bare future, since this is paid for every token."""
        self._reader = self._loop.create_future()
        return self._reader

    def take(self) -> Delta:
        """What has arrived since the last call, as one delta; a failure alone, after what came before it."""
        if len(self._waiting) == 1:
            return self._waiting.pop()
        failed = [delta for delta in self._waiting if delta.finish is not None and delta.finish.error is not None]
        good = self._waiting[: len(self._waiting) - len(failed)]
        self._waiting = failed if good else []
        return merge_deltas(good) if good else failed[0]


def merge_deltas(deltas: list[Delta]) -> Delta:
    """One delta that says the same as these, in order."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    prompt = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return replace(
        first,
        tokens=[token for delta in deltas for token in delta.tokens],
        logprobs=[entry for part in logprobs for entry in part] if logprobs else None,
        finish=last.finish,
        cached_tokens=next((delta.cached_tokens for delta in deltas if delta.cached_tokens is not None), None),
        prompt_logprobs=prompt[0] if prompt else None,
    )


def _all_busy(refusals: list[OverloadedError]) -> OverloadedError:
    """What a caller is told that no replica took: where all queues are full, when the first of them may have room."""
    seconds = [one.retry_after_s for one in refusals if isinstance(one, QueueFullError) and one.retry_after_s]
    if len(seconds) < len(refusals):
        return OverloadedError("all engine replicas are busy; try again later")
    return QueueFullError("the queues of all engine replicas are full; try again later", retry_after_s=min(seconds))


def _as_error(info: ErrorInfo) -> SgrayError:
    """The exception that a replica's error was."""
    kinds: tuple[type[SgrayError], ...] = (
        ContextLengthError,
        RequestTooLargeError,
        RequestTimeoutError,
        QueueFullError,
        OverloadedError,
        ReplicaLostError,
        ReplicaDrainingError,
        DeviceLostError,
    )
    rest = InvalidRequestError if 400 <= info.status < 500 else EngineError
    kind = next((kind for kind in kinds if kind.code == info.code), rest)
    return kind(info.message, param=info.param, code=info.code, retry_after_s=info.retry_after_s)
