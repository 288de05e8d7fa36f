"""What the border asks of whatever runs requests: the engine in this process, or replicas behind a link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from sgray.protocol import Delta, EngineInfo, Load, Request
from sgray.serve.routing.history import History


class DeltaStream(Protocol):
    """The deltas of one request, in order; the one with `finish` is the last. Async generators fit."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None:
        """Stop reading; aborts the request in the engine if it still runs. May be called twice."""
        ...


class Backend(Protocol):
    """Runs requests. Every method is for the event loop and none blocks it."""

    def submit(self, request: Request) -> DeltaStream:
        """Start a request. The stream raises a SgrayError (overloaded, replica lost, ...) where there is no answer."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Facts about the model; raises OverloadedError while no replica is known yet."""
        ...

    @property
    def history(self) -> History:
        """What became of the latest choices of replicas; empty where there is nothing to choose."""
        ...

    def abort_calls(self, name: str | None) -> None:
        """Stop the calls of this name (see call_names), or all; each gets a last delta with finish "abort"."""
        ...

    def end_programs(self, programs: Sequence[str]) -> None:
        """Hold nothing any more for these programs; unknown ones are ignored."""
        ...

    async def flush(self) -> list[str]:
        """Empty the prefix cache of every replica; the names of those where requests hold it."""
        ...

    def ready(self) -> bool:
        """Whether a replica can take work now."""
        ...

    def loads(self) -> Mapping[str, Load]:
        """The last known load of each live replica, by its name."""
        ...
