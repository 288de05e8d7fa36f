"""A scheduler and an executor joined: requests in, reports out, one step at a call, one thread.

Knows neither threads nor text. With an executor of depth 1 a step is submitted before the one ahead of it is answered,
so the device has work while the host thinks. It survives what a step throws at it: the sequences of that step end with
an error, the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from sgray.config import Config, Hardware
from sgray.engine.plan import Executor, StepPlan
from sgray.engine.scheduler import Limits, Scheduler
from sgray.errors import DeviceLostError, EngineError, InvalidRequestError, SgrayError
from sgray.memory.cache import PrefixCache
from sgray.protocol import EngineInfo, Load, Request, StepReport

if TYPE_CHECKING:
    from sgray.engine.grammar_queue import GrammarQueue
    from sgray.engine.nodes import Nodes

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 10.0
IDLE_S = 0.05

MIN_SAVED = 512
"""Keys that must not be read again for a step's plan to say that sequences share them."""

MIXED_GROWTH = Fraction(7, 3)
"""How much more prompt a step takes beside decoding sequences where much of it waits: beside 64 of them on a GPU 448
tokens instead of 192, so that the step's 256 rows become 512, and products cost by whole tiles of rows."""


class Engine:
    """One replica's engine. `failure` is what the last step died of, None once a later one has succeeded.

    `grammars` compiles what requests bring; one is made with the first grammar if none is given.
    """

    def __init__(
        self,
        executor: Executor,
        info: EngineInfo,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarQueue | None = None,
    ) -> None:
        self.info = info
        self.limits = _limits(info, config, MIN_SAVED if executor.reads_shared else 0)
        self.failure: str | None = None
        self._fault: str | None = None
        self._executor = executor
        self._depth = 0 if config.schedule.disable_overlap else executor.depth
        self._failed_step = 0
        self._clock = clock
        self._wake: Callable[[], None] = lambda: None
        self._checked = clock()
        self._cache = PrefixCache(info.num_pages, info.page_size, disabled=config.memory.disable_radix_cache)
        self._scheduler = Scheduler(
            self._cache,
            self.limits,
            clock=clock,
            policy=config.schedule.schedule_policy,
            random_seed=config.schedule.random_seed,
        )
        self._config = config
        self._grammars = grammars

    @classmethod
    def load(cls, config: Config, nodes: Nodes | None = None) -> Engine:
        """An engine with the model that the configuration names; raises ConfigError if that cannot be.

        `nodes` start ranks elsewhere, where the configuration has ranks on several nodes.
        """
        from sgray.engine.executor import load_executor  # torch is needed from here on, not to import this module

        executor, info = load_executor(config, nodes)
        return cls(executor, info, config)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell; so it is while a step is in flight."""
        return self._scheduler.has_work or self._scheduler.num_in_flight > 0

    @property
    def is_blocked(self) -> bool:
        """Whether a step is of no use before `on_wake`'s function is called."""
        return (
            self._scheduler.is_blocked
            and self._scheduler.num_in_flight == 0
            and not (self._grammars is not None and self._grammars.has_done)
        )

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Have a function called, on another thread, when a blocked engine may be stepped again."""
        self._wake = wake
        if self._grammars is not None:
            self._grammars.wake = wake

    @property
    def fault(self) -> str | None:
        """Why no step will ever succeed again, so that a new process is needed; None while one may."""
        return self._fault or self._executor.fault()

    def close(self) -> None:
        """End what runs for this engine in other processes; it can do nothing more."""
        self._executor.close()

    def prepare_grammars(self) -> None:
        """Do now what the first request with a grammar would have to wait for: seconds. For any thread, at the start.

        Nothing where there is no tokenizer.
        """
        if not self._config.model.skip_tokenizer_init:
            self._grammar_queue().prepare()

    def add(self, request: Request) -> None:
        """Queue a request; raises the SgrayError that refuses it."""
        if request.grammar is None:
            self._scheduler.add(request)
            return
        grammars = self._grammar_queue()
        grammars.check(request.grammar)
        self._scheduler.add(request)
        self._cancel_dropped(grammars)  # one of them may have had this id
        if self._scheduler.has(request.id):
            grammars.submit(request.id, request.grammar)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        self._scheduler.abort(request_id)
        if self._grammars is not None:
            self._grammars.cancel(request_id)

    def end_programs(self, programs: Sequence[str]) -> None:
        """Keep what these programs have computed no longer than anything else; unknown ones are ignored."""
        self._scheduler.end_programs(programs)

    def step(self) -> StepReport:
        """Begin the next step, if there is one, take in the oldest one that is due, and tell what happened.

        A blocked engine waits a moment.
        """
        if self._grammars is not None:
            if self.is_blocked:
                self._grammars.wait(IDLE_S)
            self._take_grammars(self._grammars)
            self._cancel_dropped(self._grammars)
        if self._scheduler.is_answer_due:
            self._collect()
        plan = self._scheduler.schedule()
        if plan is not None and not self._submit(plan):
            return self.report()
        if self._scheduler.num_in_flight > (0 if plan is None else self._depth):
            self._collect()
        return self.report()

    def report(self) -> StepReport:
        """What happened since the last report, without a step: aborts, finishes without a token, cache events."""
        scheduler = self._scheduler
        return StepReport(scheduler.drain(), self._cache.drain_events(), self.current_load(), scheduler.drain_trails())

    def current_load(self) -> Load:
        """What there is to do and how full the engine is."""
        return self._scheduler.load()

    def flush(self) -> bool:
        """Empty the prefix cache; False, with nothing done, while a sequence waits or runs."""
        while self._scheduler.is_idle and self._scheduler.num_in_flight:
            self._collect()  # a step begun ahead for a sequence that has ended since
        if not self._scheduler.is_idle:
            return False
        self._cache.clear()
        return True

    def fail_all(self, error: SgrayError) -> None:
        """End every sequence with this error and start with an empty cache."""
        self._executor.reset()
        self._cache.clear()  # before its leases: if its books are wrong, giving them back would stumble over that
        self._scheduler.fail_all(error)
        if self._grammars is not None:
            self._grammars.clear()

    def check(self) -> None:
        """Prove the books of pages and slots; AssertionError if they are wrong."""
        self._scheduler.check()

    def _grammar_queue(self) -> GrammarQueue:
        """Made with the first grammar."""
        if self._config.model.skip_tokenizer_init:
            raise InvalidRequestError(
                "this server runs without a tokenizer (model.skip_tokenizer_init), so it cannot follow a grammar"
            )
        if self._grammars is None:
            from sgray.engine.grammar_queue import GrammarQueue  # not needed where no grammar comes

            config, info = self._config, self.info
            self._grammars = GrammarQueue.of_tokenizer(
                lambda: _tokenizer_dir(config, info), info.vocab_size, info.end_ids, config.grammar
            )
            self._grammars.wake = self._wake
        return self._grammars

    def _cancel_dropped(self, grammars: GrammarQueue) -> None:
        for request_id in self._scheduler.take_dropped():
            grammars.cancel(request_id)

    def _take_grammars(self, grammars: GrammarQueue) -> None:
        """Give grammars that are ready to those that wait for them."""
        for request_id, outcome in grammars.take():
            if isinstance(outcome, SgrayError):
                self._scheduler.refuse(request_id, outcome)
            else:
                self._scheduler.resume(request_id, outcome.start)

    def _submit(self, plan: StepPlan) -> bool:
        try:
            self._executor.submit(plan)
        except Exception as error:  # whatever it is, it is this step's and not the engine's end
            logger.exception("step %d failed", plan.step)
            self._fail(error, plan.step)
            return False
        return True

    def _collect(self) -> None:
        try:
            result = self._executor.collect()
        except Exception as error:  # as above; and what was built on that step cannot be trusted either
            step = self._scheduler.oldest_step
            logger.exception("step %d failed", step)
            self._executor.reset()
            self._fail(error, step)
            return
        if result.step > self._failed_step:
            self.failure = None
        self._scheduler.update(result)
        self._check_when_idle()

    def _fail(self, error: Exception, step: int) -> None:
        """End the sequences of that step and of all later ones in flight."""
        self.failure = f"{type(error).__name__}: {error}"
        if isinstance(error, DeviceLostError):
            self._fault = self.failure
        told = error if isinstance(error, SgrayError) else EngineError("the engine failed in a step")
        self._failed_step = step
        self._scheduler.fail(told, step)

    def _check_when_idle(self) -> None:
        """Now and then, when nothing runs, look for lost pages; if there are any, log it and start afresh."""
        if not self._scheduler.is_idle or self._clock() - self._checked < CHECK_PERIOD_S:
            return
        self._checked = self._clock()
        try:
            self.check()
        except AssertionError:
            logger.exception("the cache's books are wrong; the cache is rebuilt empty")
            self._cache.clear()


def _tokenizer_dir(config: Config, info: EngineInfo) -> Path:
    from sgray.models.hub import resolve_model

    path = config.model.tokenizer_path
    return Path(info.model_dir) if path is None else resolve_model(path)


def _limits(info: EngineInfo, config: Config, min_saved: int) -> Limits:
    on_cuda = info.device.startswith("cuda")
    schedule = config.resolve(Hardware(num_threads=1, memory_bytes=0, has_cuda=on_cuda)).schedule
    assert isinstance(schedule.chunked_prefill_size, int) and isinstance(schedule.mixed_prefill_size, int), "resolved"
    assert isinstance(schedule.max_queued_tokens, int), "resolved"
    return Limits(
        token_budget=schedule.chunked_prefill_size,
        mixed_prefill=schedule.mixed_prefill_size,
        most_mixed_prefill=int(schedule.mixed_prefill_size * MIXED_GROWTH),
        max_running=info.max_running_requests,
        max_queued=schedule.max_queued_requests,
        max_queued_tokens=schedule.max_queued_tokens,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        end_ids=info.end_ids,
        min_saved=min_saved,
    )
