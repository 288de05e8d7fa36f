"""The link between an ingress and an engine replica: requests, aborts, flushes down; deltas, cache events, load up.

One connection carries all requests of the pair. The replica sends one frame a step, and tells each ingress at once what
the others have given it, so that they need no talk with each other. Frames are msgpack of the types below, decoded by
type; nothing is ever pickled. The replica's random token must come first.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from sgray.engine.sequence import failure
from sgray.errors import (
    InvalidRequestError,
    ReplicaDrainingError,
    ReplicaLostError,
    RequestTooLargeError,
    SgrayError,
)
from sgray.protocol import CacheEvent, Delta, EngineInfo, Load, Request, StepReport
from sgray.serve.call_names import is_of_call
from sgray.serve.frames import FrameConnection, LinkLimits

logger = logging.getLogger(__name__)

VERSION = 4
SNAPSHOT_HASHES = 1 << 16  # a frame
UNOPENED_FRAME_BYTES = 4096


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The first frame of an ingress."""

    version: int
    token: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start a request; its id belongs to this connection until its last delta. `hashes` are its prompt's whole pages,
    where it may be cached."""

    request: Request
    hashes: list[int] = []


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop a request; nothing more is sent for it."""

    id: str


class AbortCalls(msgspec.Struct, frozen=True, array_like=True, tag="abort_calls"):
    """Stop the requests of a name, whichever ingress they came from, or of all names; each gets its last delta."""

    name: str | None


class EndPrograms(msgspec.Struct, frozen=True, array_like=True, tag="end_programs"):
    """These programs have ended; there is no answer."""

    programs: list[str]


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Empty the prefix cache; `number` comes back with the answer."""

    number: int


class Resync(msgspec.Struct, frozen=True, array_like=True, tag="resync"):
    """Ask for a new snapshot, after a gap in the sequence numbers."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first frame of a replica; a snapshot follows."""

    version: int
    info: EngineInfo
    load: Load


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """A part of the hashes of all stored pages, as of event batch `sequence`; complete with the `last` part."""

    sequence: int
    hashes: list[int]
    last: bool


class Booked(msgspec.Struct, frozen=True, array_like=True, tag="booked"):
    """Another ingress has given the replica a request: of its prompt's whole pages `num_known` were stored, the others
    are to be computed. It ends with a step that names its id."""

    id: str
    num_tokens: int
    num_known: int
    hashes: list[int]


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one step did for this ingress. `sequence` counts the non-empty event batches of the replica's life; `ended`
    are requests that are gone of those that any ingress was told of by `Booked`."""

    sequence: int
    deltas: list[Delta]
    events: list[CacheEvent]
    load: Load
    ended: list[str] = []


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    """Whether the cache is empty now; the step that tells of it came before."""

    number: int
    is_empty: bool


class Draining(msgspec.Struct, frozen=True, array_like=True, tag="draining"):
    """The replica takes nothing new from now on and goes away after its last stream."""


FromIngress = Open | Submit | Abort | AbortCalls | EndPrograms | Flush | Resync

_encode = msgspec.msgpack.Encoder().encode
_decode_from_ingress = msgspec.msgpack.Decoder(FromIngress).decode
_decode_from_replica = msgspec.msgpack.Decoder(Hello | Snapshot | Booked | Step | Flushed | Draining).decode


class LinkObserver(Protocol):
    """Who wants to know what a replica tells about itself. Called on the event loop; must not block."""

    def on_snapshot(self, hashes: list[int]) -> None:
        """Every page that the replica stores, as hashes; the first call, and again after a gap."""

    def on_events(self, events: list[CacheEvent]) -> None:
        """What changed since."""

    def on_load(self, load: Load) -> None:
        """What the replica has to do."""

    def on_booked(self, booked: Booked) -> None:
        """Another ingress has given it a request."""

    def on_ended(self, request_ids: list[str]) -> None:
        """These requests of others are gone from it; there may be own ones among them."""

    def on_draining(self) -> None:
        """It takes no new requests."""

    def on_lost(self, reason: str) -> None:
        """The link is gone for good; comes once, and only if the link was open."""


Sink = Callable[[Delta], None]


class ReplicaLink:
    """The ingress's end; usable after `open`. A lost link answers every stream with a `replica_lost` error."""

    def __init__(self, observer: LinkObserver, limits: LinkLimits | None = None) -> None:
        self._observer = observer
        self._limits = limits or LinkLimits()
        self._connection = FrameConnection(self._on_frame, self._on_lost, self._limits)
        self._sinks: dict[str, Sink] = {}
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._num_flushes = 0
        self._snapshot: list[int] = []
        self._sequence: int | None = None  # None while a snapshot is awaited
        self._hello: Hello | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, host: str, port: int, token: str) -> None:
        """Connect, present the token, wait for the first snapshot. Raises OSError or ReplicaLostError."""
        try:
            await asyncio.wait_for(self._open(host, port, token), self._limits.open_timeout_s)
        except asyncio.TimeoutError:
            raise _lost("it did not open in time") from None
        finally:
            if not self._opened.done() or self._opened.cancelled() or self._opened.exception() is not None:
                self._connection.abort("could not be opened")

    async def _open(self, host: str, port: int, token: str) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._connection, host, port)
        self._connection.send(_encode(Open(VERSION, token)))
        await self._opened

    @property
    def info(self) -> EngineInfo:
        """The facts about the replica's engine."""
        assert self._hello is not None
        return self._hello.info

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted."""
        return self._connection.is_open

    @property
    def num_streams(self) -> int:
        """Requests without a last delta."""
        return len(self._sinks)

    def submit(self, request: Request, sink: Sink, hashes: Sequence[int] = ()) -> None:
        """Send a request; `sink` gets its deltas until one with `finish`, on a dead link at once. `hashes` are those of
        its prompt's pages."""
        if not self.is_open:
            sink(_failed(request.id, _lost("it was closed")))
            return
        frame = _encode(Submit(request, list(hashes)))
        if len(frame) > self._limits.max_frame_bytes:
            raise RequestTooLargeError(f"the request is too large for the link ({len(frame)} bytes)")
        assert request.id not in self._sinks, request.id
        self._sinks[request.id] = sink
        self._connection.send(frame)

    def abort(self, request_id: str) -> None:
        """Stop a request; its sink is not called any more. Unknown or finished ids are ignored."""
        if self._sinks.pop(request_id, None) is not None:
            self._connection.send(_encode(Abort(request_id)))

    def abort_calls(self, name: str | None) -> None:
        """Stop the requests of this name, also those of other ingresses, or all; their last deltas tell of it."""
        if self._hello is not None:  # the token must come first
            self._connection.send(_encode(AbortCalls(name)))

    def end_programs(self, programs: Sequence[str]) -> None:
        """Tell the replica that these programs have ended, whichever ingress their requests came from."""
        if self._hello is not None:
            self._connection.send(_encode(EndPrograms(list(programs))))

    async def flush(self) -> bool:
        """Empty the replica's prefix cache; False where requests hold it. Raises ReplicaLostError."""
        if not self.is_open or self._hello is None:
            raise _lost("it is not open")
        self._num_flushes += 1
        number = self._num_flushes
        answer = self._flushes[number] = asyncio.get_running_loop().create_future()
        self._connection.send(_encode(Flush(number)))
        try:
            return await answer
        finally:
            self._flushes.pop(number, None)

    def close(self) -> None:
        """Close the link; streams that still run are answered by an error."""
        self._connection.close()

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = _decode_from_replica(frame)
        except msgspec.MsgspecError as error:
            self._connection.abort(f"unreadable frame: {error}")
            return
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Snapshot):
            self._on_snapshot(message)
        elif isinstance(message, Booked):
            self._observer.on_booked(message)
        elif isinstance(message, Flushed):
            self._on_flushed(message)
        elif isinstance(message, Draining):
            self._observer.on_draining()
        else:
            self._hello = message

    def _on_step(self, step: Step) -> None:
        if self._sequence is not None:
            self._follow(step)
        self._observer.on_load(step.load)
        for delta in step.deltas:
            sink = self._sinks.get(delta.id) if delta.finish is None else self._sinks.pop(delta.id, None)
            if sink is not None:
                sink(delta)
        if step.ended:
            self._observer.on_ended(step.ended)

    def _follow(self, step: Step) -> None:
        """Hand on events in order; after a gap the picture is worthless and a new one is asked for."""
        assert self._sequence is not None
        expected = self._sequence + (1 if step.events else 0)
        if step.sequence != expected:
            logger.warning("cache events %d came where %d was expected; resynchronising", step.sequence, expected)
            self._sequence = None
            self._snapshot = []
            self._connection.send(_encode(Resync()))
            return
        self._sequence = step.sequence
        if step.events:
            self._observer.on_events(step.events)

    def _on_snapshot(self, part: Snapshot) -> None:
        self._snapshot += part.hashes
        if not part.last:
            return
        self._observer.on_snapshot(self._snapshot)
        self._snapshot = []
        self._sequence = part.sequence
        if not self._opened.done() and self._hello is not None:
            self._observer.on_load(self._hello.load)
            self._opened.set_result(None)

    def _on_flushed(self, answer: Flushed) -> None:
        asker = self._flushes.get(answer.number)
        if asker is not None and not asker.done():  # it is done where the asker was cancelled
            asker.set_result(answer.is_empty)

    def _on_lost(self, reason: str) -> None:
        if not self._opened.done():
            self._opened.set_exception(_lost(reason))
            self._opened.exception()  # seen here in case that nobody waits any more
            return
        if self._opened.cancelled():
            return
        for asker in self._flushes.values():
            if not asker.done():
                asker.set_exception(_lost(reason))
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink(_failed(request_id, _lost(reason)))
        self._observer.on_lost(reason)


class EngineDoor(Protocol):
    """The part of the engine loop that the link needs; all return at once and never raise for a request."""

    def submit(self, request: Request) -> None:
        """Start a request; a refusal comes as a delta."""

    def abort(self, request_id: str) -> None:
        """Stop a request; its last delta tells of it."""

    def end_programs(self, programs: Sequence[str]) -> None:
        """Hold nothing any more for these programs."""

    def flush(self, done: Callable[[bool], None]) -> None:
        """Empty the prefix cache; `done` may be called on any thread, after the report of it was published."""


class LinkServer:
    """The replica's end: any number of ingresses. Everything but `publish` belongs to the event loop's thread."""

    def __init__(self, engine: EngineDoor, info: EngineInfo, token: str, limits: LinkLimits | None = None) -> None:
        self._engine = engine
        self._info = info
        self._token = token.encode()
        self._limits = limits or LinkLimits()
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._peers: set[_Peer] = set()
        self._owners: dict[str, _Peer] = {}
        self._booked: set[str] = set()  # requests that ingresses were told of which do not own them
        self._ended: list[str] = []  # of those, what the next step tells
        self._stored: dict[int, None] = {}  # a copy of the cache's contents, so that snapshots need no engine
        self._sequence = 0
        self._load = Load(total_pages=info.num_pages, free_pages=info.num_pages)
        self._draining = False

    async def start(self, host: str) -> int:
        """Listen on `host`, on a port of the system's choice, which is returned."""
        self._server = await self._loop.create_server(self._new_peer, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_streams(self) -> int:
        """Requests of all ingresses without a last delta."""
        return len(self._owners)

    @property
    def load(self) -> Load:
        """The load of the last step."""
        return self._load

    def publish(self, report: StepReport) -> None:
        """Send what a step did to whom it concerns. Callable from any thread; returns at once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, report)

    def drain(self) -> None:
        """Refuse new requests from now on, and say so; running ones go on."""
        self._draining = True
        for peer in self._peers:
            peer.connection.send(_encode(Draining()))

    async def close(self) -> None:
        """Stop listening and close every connection once its frames are sent."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.connection.close()

    def _new_peer(self) -> FrameConnection:
        peer = _Peer(self)
        self._loop.call_later(self._limits.open_timeout_s, peer.expect_opened)
        return peer.connection

    def _deliver(self, report: StepReport) -> None:
        self._load = report.load
        self._remember(report.events)
        own: dict[_Peer, list[Delta]] = {peer: [] for peer in self._peers}
        for delta in report.deltas:
            peer = self._owners.get(delta.id) if delta.finish is None else self._end(delta.id)
            if peer in own:
                own[peer].append(delta)
        ended, self._ended = self._ended, []
        for peer, deltas in own.items():
            for frame in self._frames(deltas, report, ended):
                peer.connection.send(frame)

    def _end(self, request_id: str) -> _Peer | None:
        """Whose request it was; if others know of it, they will be told that it is gone."""
        if request_id in self._booked:
            self._booked.remove(request_id)
            self._ended.append(request_id)
        return self._owners.pop(request_id, None)

    def _remember(self, events: Iterable[CacheEvent]) -> None:
        counted = False
        for event in events:
            if not counted:
                self._sequence += 1
                counted = True
            if event.kind == "stored":
                self._stored.update(dict.fromkeys(event.hashes))
            elif event.kind == "removed":
                for page in event.hashes:
                    self._stored.pop(page, None)
            else:
                self._stored.clear()

    def _frames(self, deltas: list[Delta], report: StepReport, ended: list[str]) -> list[bytes]:
        """One frame; several, without repeating the events, if one would be larger than the peer accepts."""
        frame = _encode(Step(self._sequence, deltas, report.events, report.load, ended))
        if len(frame) <= self._limits.max_frame_bytes:
            return [frame]
        frames = [_encode(Step(self._sequence, [], report.events, report.load, ended))]
        for delta in deltas:
            frame = _encode(Step(self._sequence, [delta], [], report.load))
            if len(frame) > self._limits.max_frame_bytes:
                self._engine.abort(delta.id)
                self._end(delta.id)
                too_large = RequestTooLargeError("the answer is too large to be sent; ask for fewer logprobs")
                frame = _encode(Step(self._sequence, [_failed(delta.id, too_large)], [], report.load))
            frames.append(frame)
        return frames

    # What peers call.

    def _open(self, peer: _Peer) -> None:
        peer.connection.send(_encode(Hello(VERSION, self._info, self._load)))
        self._send_snapshot(peer)
        self._peers.add(peer)
        if self._draining:
            peer.connection.send(_encode(Draining()))

    def _send_snapshot(self, peer: _Peer) -> None:
        """All parts at once, so that no step comes between them."""
        hashes = list(self._stored)
        for start in range(0, max(1, len(hashes)), SNAPSHOT_HASHES):
            part = hashes[start : start + SNAPSHOT_HASHES]
            peer.connection.send(_encode(Snapshot(self._sequence, part, start + SNAPSHOT_HASHES >= len(hashes))))

    def _submit(self, peer: _Peer, request: Request, hashes: list[int]) -> None:
        refusal: SgrayError | None = None
        if self._draining:
            refusal = ReplicaDrainingError("the replica is shutting down; send the request again")
        elif request.id in self._owners:
            refusal = InvalidRequestError(f"request id {request.id!r} is already in use", param="id")
        if refusal is not None:
            peer.connection.send(_encode(Step(self._sequence, [_failed(request.id, refusal)], [], self._load)))
            return
        self._owners[request.id] = peer
        self._engine.submit(request)
        if len(self._peers) > 1:
            self._tell_others(peer, request, hashes)

    def _tell_others(self, peer: _Peer, request: Request, hashes: list[int]) -> None:
        known = next((number for number, page in enumerate(hashes) if page not in self._stored), len(hashes))
        frame = _encode(Booked(request.id, len(request.tokens), known, hashes[known:]))
        self._booked.add(request.id)
        for other in self._peers:
            if other is not peer:
                other.connection.send(frame)

    def _abort(self, peer: _Peer, request_id: str) -> None:
        if self._owners.get(request_id) is peer:
            self._end(request_id)
            self._engine.abort(request_id)

    def _abort_calls(self, name: str | None) -> None:
        """As the engine answers these with a last delta, their owners stay to get it."""
        for request_id in list(self._owners):
            if name is None or is_of_call(request_id, name):
                self._engine.abort(request_id)

    def _flush(self, peer: _Peer, number: int) -> None:
        def answer(is_empty: bool) -> None:
            if not self._loop.is_closed():
                frame = _encode(Flushed(number, is_empty))
                self._loop.call_soon_threadsafe(peer.connection.send, frame)

        self._engine.flush(answer)

    def _lost(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        for request_id in [request_id for request_id, owner in self._owners.items() if owner is peer]:
            self._abort(peer, request_id)


class _Peer:
    """One connected ingress, as the replica sees it."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self.connection = FrameConnection(self._on_frame, self._on_lost, server._limits)
        # Nobody without the token makes this process hold more than this.
        self.connection.max_frame_bytes = UNOPENED_FRAME_BYTES
        self._is_opened = False

    def expect_opened(self) -> None:
        """Drop a connection that did not present the token in time."""
        if not self._is_opened:
            self.connection.abort("no token came in time")

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = _decode_from_ingress(frame)
        except msgspec.MsgspecError as error:
            self.connection.abort(f"unreadable frame: {error}")
            return
        if not self._is_opened:
            self._authenticate(message)
        elif isinstance(message, Submit):
            self._server._submit(self, message.request, message.hashes)
        elif isinstance(message, Abort):
            self._server._abort(self, message.id)
        elif isinstance(message, AbortCalls):
            self._server._abort_calls(message.name)
        elif isinstance(message, EndPrograms):
            self._server._engine.end_programs(message.programs)
        elif isinstance(message, Flush):
            self._server._flush(self, message.number)
        elif isinstance(message, Resync):
            self._server._send_snapshot(self)

    def _authenticate(self, message: FromIngress) -> None:
        if not isinstance(message, Open) or not hmac.compare_digest(message.token.encode(), self._server._token):
            self.connection.abort("wrong token")
        elif message.version != VERSION:
            self.connection.abort(f"the ingress speaks version {message.version} of the link, this replica {VERSION}")
        else:
            self._is_opened = True
            self.connection.max_frame_bytes = self._server._limits.max_frame_bytes
            self._server._open(self)

    def _on_lost(self, reason: str) -> None:
        if self._is_opened:
            logger.info("an ingress is gone: %s", reason)
        self._server._lost(self)


def _lost(reason: str) -> ReplicaLostError:
    return ReplicaLostError(f"the connection to the replica is gone ({reason}); send the request again")


def _failed(request_id: str, error: SgrayError) -> Delta:
    return Delta(request_id, finish=failure(error))
