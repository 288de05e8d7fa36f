"""The engine of this process as a backend of the HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from sgray.engine.engine import Engine
from sgray.engine.loop import EngineLoop
from sgray.protocol import Delta, EngineInfo, Load, Request, StepReport
from sgray.serve.call_names import is_of_call
from sgray.serve.routing.history import History


class LoopBackend:
    """The engine's thread as a backend: deltas come over to the event loop of whoever submitted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.history = History()
        self._sinks: dict[str, Callable[[Delta], None]] = {}
        self._load = Load()
        self.loop = EngineLoop(engine, self._publish)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def abort_calls(self, name: str | None) -> None:
        for request_id in list(self._sinks):
            if name is None or is_of_call(request_id, name):
                self.loop.abort(request_id)

    def end_programs(self, programs: Sequence[str]) -> None:
        self.loop.end_programs(programs)

    async def flush(self) -> list[str]:
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        answers: list[bool] = []

        def done(is_empty: bool) -> None:
            answers.append(is_empty)
            loop.call_soon_threadsafe(told.set)

        self.loop.flush(done)
        await told.wait()
        return [] if answers[0] else ["here"]

    def ready(self) -> bool:
        return self.loop.health().alive

    def loads(self) -> Mapping[str, Load]:
        return {"here": self._load}

    async def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._sinks[request.id] = lambda delta: loop.call_soon_threadsafe(queue.put_nowait, delta)
        self.loop.submit(request)
        try:
            while True:
                delta = await queue.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            del self._sinks[request.id]
            self.loop.abort(request.id)

    def _publish(self, report: StepReport) -> None:
        self._load = report.load
        for delta in report.deltas:
            if sink := self._sinks.get(delta.id):
                sink(delta)


async def idle(backend: LoopBackend) -> Load:
    """The load once nothing runs, which must be soon."""
    load, health = Load(), backend.loop.health()
    for _ in range(1000):
        load, health = backend.loads()["here"], backend.loop.health()
        if not load.running and not load.waiting and not health.busy:
            return load
        await asyncio.sleep(0.01)
    raise AssertionError(f"the engine still runs: {load} {health}")
