"""The one thread that steps an engine, and the one door to it from other threads.

Callers leave requests and aborts in an inbox and are never blocked; everything that happens comes out through one
callback, on the loop's thread. Knows nothing of HTTP or asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sgray.engine.engine import Engine
from sgray.engine.sequence import failure
from sgray.errors import EngineError, ReplicaLostError, SgrayError
from sgray.protocol import Delta, Request, StepReport

logger = logging.getLogger(__name__)

NUM_TIMED = 1000


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """Whether there is work, how long ago the last step ended (or the work came), and what the last step died of.

    `slow_step_s`: of the last steps, one in a hundred took longer. `is_lost`: the engine will not recover.
    """

    busy: bool
    last_step_age_s: float
    alive: bool
    error: str | None = None
    is_lost: bool = False
    slow_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Flush:
    """The wish to empty the cache; `done` is told whether that was possible."""

    done: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class EndPrograms:
    """The news that programs have ended."""

    programs: Sequence[str]


Item = Request | str | Flush | EndPrograms  # a request to add, the id of one to abort, a flush, or that news


class EngineLoop:
    """Runs steps while there is work and sleeps otherwise.

    `publish` gets each report, on the loop's thread; once `stop` was called, on the thread of whoever comes late.
    Nothing a request does ends the thread: a step that fails answers its own sequences with errors.
    """

    def __init__(
        self, engine: Engine, publish: Callable[[StepReport], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._clock = clock
        self._wake = threading.Condition()
        self._inbox: list[Item] = []
        self._is_stopping = False
        self._is_busy = False
        self._last_step = clock()
        self._times: list[float] = []  # of the last steps, in seconds; a ring
        self._num_steps = 0
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="sgray-engine", daemon=True)
        engine.on_wake(self._wake_up)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand in a request; if it is refused, a delta with finish "error" says so. Never blocks."""
        self._put(request)

    def abort(self, request_id: str) -> None:
        """End a request; a delta with finish "abort" follows if it was unfinished. Never blocks."""
        self._put(request_id)

    def end_programs(self, programs: Sequence[str]) -> None:
        """These programs have ended: nothing is held for them any more. Never blocks."""
        self._put(EndPrograms(programs))

    def flush(self, done: Callable[[bool], None]) -> None:
        """Empty the prefix cache between two steps. Never blocks.

        `done` gets whether it was emptied, which it is not while requests hold it: on the thread that `publish` is
        called on, after the report that says so.
        """
        self._put(Flush(done))

    def health(self) -> LoopHealth:
        """How the loop is doing; may be called from any thread while a step runs."""
        fault = self._engine.fault
        return LoopHealth(
            busy=self._is_busy or bool(self._inbox),
            last_step_age_s=max(0.0, self._clock() - self._last_step),
            alive=self._thread.is_alive(),
            error=fault or self._error,
            is_lost=fault is not None,
            slow_step_s=_slowest(self._times.copy()),
        )

    def stop(self) -> None:
        """End the loop after the step in hand and wait for it. Unfinished requests are answered with an error."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._refuse_all()
        self._engine.close()

    def _put(self, item: Item) -> None:
        with self._wake:
            is_late = self._is_stopping
            if not is_late:
                self._mark_busy()
                self._inbox.append(item)
                self._wake.notify()
        if is_late and isinstance(item, Request):
            self._send(self._answer([item]))
        if is_late:
            self._tell_flushed([item], is_empty=False)

    def _wake_up(self) -> None:
        """What the engine was blocked by may be gone."""
        with self._wake:
            self._wake.notify()

    def _mark_busy(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._last_step = self._clock()

    def _run(self) -> None:
        while (items := self._wait()) is not None:
            try:
                self._turn(items)
            except Exception as error:  # a fault of the engine itself: answer everybody, go on with a clean cache
                logger.exception("the engine failed between steps")
                self._recover(error)

    def _wait(self) -> list[Item] | None:
        """What came in, at once if there is work; None when the loop is to end."""
        with self._wake:
            while not (self._inbox or self._is_stopping or self._can_step()):
                self._is_busy = False
                self._wake.wait()
            self._mark_busy()
            if self._is_stopping:
                return None
            items, self._inbox = self._inbox, []
            return items

    def _turn(self, items: list[Item]) -> None:
        if items:
            refusals = [delta for item in items if (delta := self._take(item)) is not None]
            is_empty = any(isinstance(item, Flush) for item in items) and self._engine.flush()
            report = self._engine.report()
            if refusals or report.deltas or report.events:  # do not let these wait for a step
                self._send(replace(report, deltas=refusals + report.deltas))
            self._tell_flushed(items, is_empty=is_empty)
        if not self._can_step():
            return
        begin = self._clock()
        report = self._engine.step()
        self._last_step = self._clock()
        self._time(self._last_step - begin)
        self._error = self._engine.failure
        self._send(report)

    def _time(self, duration_s: float) -> None:
        if len(self._times) < NUM_TIMED:
            self._times.append(duration_s)
        else:
            self._times[self._num_steps % NUM_TIMED] = duration_s
        self._num_steps += 1

    def _can_step(self) -> bool:
        return self._engine.has_work and not self._engine.is_blocked

    def _take(self, item: Item) -> Delta | None:
        """Pass one inbox item on, but for a flush, which comes after all of them; the answer if it is refused."""
        if isinstance(item, Flush):
            return None
        if isinstance(item, EndPrograms):
            self._engine.end_programs(item.programs)
            return None
        if isinstance(item, str):
            self._engine.abort(item)
            return None
        try:
            self._engine.add(item)
        except SgrayError as error:
            return _refusal(item, error)
        except Exception:  # malformed beyond what the border lets through: that request's own trouble
            logger.exception("request %s could not be taken", item.id)
            return _refusal(item, EngineError("the engine could not take the request"))
        return None

    def _send(self, report: StepReport) -> None:
        try:
            self._publish(report)
        except Exception:  # the listener's fault, as when its event loop has closed; the engine goes on for the others
            logger.exception("a report could not be published")

    def _tell_flushed(self, items: list[Item], *, is_empty: bool) -> None:
        for item in items:
            if isinstance(item, Flush):
                try:
                    item.done(is_empty)
                except Exception:  # the asker's fault, as in `_send`
                    logger.exception("nobody could be told about a flush")

    def _recover(self, error: Exception) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self._last_step = self._clock()
        self._engine.fail_all(EngineError("the engine failed and was reset"))
        self._send(self._engine.report())

    def _refuse_all(self) -> None:
        """Answer what is left when the thread is gone."""
        items, self._inbox = self._inbox, []
        self._engine.fail_all(ReplicaLostError("the engine was stopped"))
        report = self._engine.report()
        self._is_busy = False
        self._tell_flushed(items, is_empty=False)
        rest = self._answer([item for item in items if isinstance(item, Request)]).deltas
        if report.deltas or rest:
            self._send(replace(report, deltas=report.deltas + rest))

    def _answer(self, requests: list[Request]) -> StepReport:
        error = ReplicaLostError("the engine was stopped")
        return StepReport([_refusal(request, error) for request in requests], [], self._engine.current_load())


def _slowest(times: list[float]) -> float:
    """The time that one in a hundred exceeds; 0 of none."""
    return sorted(times)[len(times) * 99 // 100] if times else 0.0


def _refusal(request: Request, error: SgrayError) -> Delta:
    return Delta(request.id, finish=failure(error), cached_tokens=0)
