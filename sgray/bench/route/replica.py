"""A replica with the real scheduler and the real prefix cache; only the executor is a formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from sgray.bench.route.arrivals import BLOCK
from sgray.bench.route.timing import Size, Timing
from sgray.engine.plan import StepPlan, StepResult
from sgray.engine.scheduler import Limits, Scheduler
from sgray.memory.cache import PrefixCache
from sgray.protocol import Request, StepReport

UNBOUNDED = 2**62
FIRST_DRAWN = 2**40  # generated tokens are numbers that no prompt has


class Replica(Protocol):
    """What the simulation asks of a replica. A token is `grain` tokens of the workload throughout."""

    def submit(self, request: Request) -> None:
        """Take a request."""

    def begin(self) -> float | None:
        """Begin a step: the seconds it takes, or None if there is nothing to do."""

    def end(self) -> StepReport:
        """End the step that was begun."""

    def snapshot(self) -> list[int]:
        """The hash of every stored page."""

    @property
    def computed(self) -> int:
        """Prompt tokens computed so far."""


class EngineReplica:
    """Steps one at a time: the next is planned when the last is answered."""

    def __init__(self, timing: Timing, size: Size, clock: Callable[[], float]) -> None:
        grain = size.grain
        self._timing = timing
        self._grain = grain
        self._cache = PrefixCache(size.memory_tokens // BLOCK, BLOCK // grain)
        limits = Limits(
            token_budget=max(2, size.step_tokens // grain),
            mixed_prefill=size.mixed_tokens,  # a step of the simulation stands for `grain` steps
            max_running=size.max_running,
            max_queued=UNBOUNDED,
            max_queued_tokens=UNBOUNDED,
            context_length=UNBOUNDED,
            vocab_size=UNBOUNDED,
            min_lookahead=max(1, 64 // grain),
        )
        self._scheduler = Scheduler(self._cache, limits, clock=clock, random_seed=0)
        self._drawn: Iterator[int] = itertools.count(FIRST_DRAWN)
        self._plan: StepPlan | None = None
        self.computed = 0

    def submit(self, request: Request) -> None:
        """Take a request."""
        self._scheduler.add(request)

    def begin(self) -> float | None:
        """Begin a step."""
        self._plan = plan = self._scheduler.schedule()
        return None if plan is None else self._seconds(plan)

    def end(self) -> StepReport:
        """End the step."""
        plan = self._plan
        assert plan is not None
        tokens = [next(self._drawn) if samples else -1 for samples in plan.samples]
        nothing: list[None] = [None] * len(tokens)
        self._scheduler.update(StepResult(plan.step, tokens, list(nothing), list(nothing)))
        return StepReport(self._scheduler.drain(), self._cache.drain_events(), self._scheduler.load())

    def snapshot(self) -> list[int]:
        """The hash of every stored page."""
        return self._cache.snapshot()

    def check(self) -> None:
        """Prove the books of the scheduler and the cache."""
        self._scheduler.check()

    def _seconds(self, plan: StepPlan) -> float:
        timing, grain = self._timing, self._grain
        prefill_s = 0.0
        context, sequences = sum(plan.starts), len(plan.lengths)
        if max(plan.lengths) > 1:
            for start, length in zip(plan.starts, plan.lengths, strict=True):
                if length > 1:
                    prefill_s += timing.prefill_s(start * grain, length * grain)
                    self.computed += length
                    context -= start
                    sequences -= 1
        if not sequences:
            return max(timing.step_s, prefill_s)
        return prefill_s + grain * timing.decode_s(sequences, context * grain)
