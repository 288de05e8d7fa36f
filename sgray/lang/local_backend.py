"""An engine in this process behind the same checks as the server's: no HTTP, no Ray, two threads.

One thread steps the engine, the other is the event loop that text and requests live on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from sgray.engine.engine import Engine
from sgray.engine.loop import EngineLoop
from sgray.protocol import Delta, EngineInfo, Load, Request, StepReport
from sgray.serve.call_names import is_of_call
from sgray.serve.openai.service import OpenAIService
from sgray.serve.routing.history import History


class LocalEngine:
    """Runs requests for a service on one event loop, on an engine in this process.

    Make it on that loop. It implements what the service asks of its backend.
    """

    def __init__(self, engine: Engine) -> None:
        self.info: EngineInfo = engine.info
        self.history = History()
        self._engine = engine
        self._events = asyncio.get_running_loop()
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._load = Load()
        self._steps = EngineLoop(engine, self._publish)
        self._steps.start()

    async def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The deltas of a request; closing the generator aborts it."""
        arrived: asyncio.Queue[Delta] = asyncio.Queue()
        self._streams[request.id] = arrived
        is_done = False
        try:
            self._steps.submit(request)
            while not is_done:
                delta = await arrived.get()
                is_done = delta.finish is not None
                yield delta
        finally:
            self._streams.pop(request.id, None)
            if not is_done:
                self._steps.abort(request.id)

    def abort_calls(self, name: str | None) -> None:
        """Stop the calls of this name, or all."""
        for request_id in [one for one in self._streams if name is None or is_of_call(one, name)]:
            self._steps.abort(request_id)

    def end_programs(self, programs: Sequence[str]) -> None:
        """Hold nothing any more for these programs."""
        self._steps.end_programs(programs)

    async def flush(self) -> list[str]:
        """Empty the prefix cache."""
        done: asyncio.Future[bool] = self._events.create_future()

        def settle(is_empty: bool) -> None:
            if not done.done():
                done.set_result(is_empty)

        def tell(is_empty: bool) -> None:
            self._events.call_soon_threadsafe(settle, is_empty)

        self._steps.flush(tell)
        return [] if await done else ["this process"]

    def ready(self) -> bool:
        """Whether the engine's thread lives."""
        return self._steps.health().alive

    def loads(self) -> Mapping[str, Load]:
        """The load after the last step."""
        return {"local": self._load}

    async def stop(self) -> None:
        """End the engine's thread; unfinished requests get an error."""
        await asyncio.to_thread(self._steps.stop)

    def _publish(self, report: StepReport) -> None:
        """Called on the engine's thread."""
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._receive, report)

    def _receive(self, report: StepReport) -> None:
        self._load = report.load
        for delta in report.deltas:
            arrived = self._streams.get(delta.id)
            if arrived is not None:
                arrived.put_nowait(delta)


class LocalTransport:
    """Carries calls to a service on the same event loop."""

    def __init__(self, service: OpenAIService) -> None:
        self._service = service

    async def call(self, name: str, body: Mapping[str, Any]) -> Any:
        """See Transport."""
        calls = {
            "generate": self._service.generate,
            "tokenize": self._service.tokenize,
            "detokenize": self._service.detokenize,
            "score": self._service.score,
        }
        return await calls[name](body)

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See Transport."""
        chunks = await self._service.generate(body)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    async def abort(self, name: str) -> None:
        """See Transport."""
        self._service.backend.abort_calls(name)

    async def end_programs(self, programs: Sequence[str]) -> None:
        """See Transport."""
        self._service.backend.end_programs(programs)

    async def flush(self) -> bool:
        """See Transport."""
        return not await self._service.backend.flush()

    async def server_info(self) -> dict[str, Any]:
        """See Transport."""
        return self._service.control.server_info()
