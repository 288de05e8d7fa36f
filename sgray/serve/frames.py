"""One TCP connection that carries whole frames both ways, notices a dead peer and never buffers without bound.

A frame is four bytes of length (little endian) and that many bytes; an empty frame is a heartbeat. Knows nothing of
what the frames mean.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

logger = logging.getLogger(__name__)

HEADER_BYTES = 4


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of one connection. The silence is counted in heartbeats, so that a process that was itself stalled does
    not take its peer for dead."""

    heartbeat_s: float = 1.0
    dead_after_beats: int = 10
    max_frame_bytes: int = 32 * 2**20
    max_buffered_bytes: int = 64 * 2**20
    open_timeout_s: float = 5.0


class FrameConnection(asyncio.Protocol):
    """One end of a connection. `on_frame` gets each frame; `on_lost` comes exactly once, with the reason, as soon as
    the connection ends on either side, and no frame comes after it.

    `max_frame_bytes` may be changed at any time; it holds from the next received frame on.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None], limits: LinkLimits) -> None:
        self.max_frame_bytes = limits.max_frame_bytes
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._silent_beats = 0
        self._beat_timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent."""
        return self._transport is not None and not self._closed

    def send(self, frame: bytes) -> None:
        """Queue one frame; in silence if the connection is gone. A peer that does not read is dropped."""
        if self._transport is None or self._closed:
            return
        self._transport.writelines((len(frame).to_bytes(HEADER_BYTES, "little"), frame))
        if self._transport.get_write_buffer_size() > self._limits.max_buffered_bytes:
            self.abort("the peer does not read what it is sent")

    def close(self) -> None:
        """Close after everything queued is sent."""
        if self._transport is not None:
            self._transport.close()
        self._end("closed by this side")

    def abort(self, reason: str) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        transport = cast("asyncio.Transport", transport)  # uvloop's transports only behave like one
        if self._closed:
            transport.abort()
            return
        self._transport = transport
        raw: socket.socket = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._schedule_beat()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._silent_beats = 0
        self._buffer += data
        start = 0
        while not self._closed and len(self._buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "little")
            if size > self.max_frame_bytes:
                self.abort(f"the peer announced a frame of {size} bytes; {self.max_frame_bytes} are allowed")
                return
            end = start + HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[start + HEADER_BYTES : end])
            start = end
            if size:
                self._on_frame(frame)
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio, once."""
        self._end("the peer closed the connection" if exc is None else str(exc) or type(exc).__name__)

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._on_lost(reason)

    def _schedule_beat(self) -> None:
        self._beat_timer = asyncio.get_running_loop().call_later(self._limits.heartbeat_s, self._beat)

    def _beat(self) -> None:
        self._silent_beats += 1
        if self._silent_beats > self._limits.dead_after_beats:
            self.abort(f"nothing heard from the peer for {self._limits.dead_after_beats} heartbeats")
            return
        self.send(b"")
        if self.is_open:
            self._schedule_beat()
