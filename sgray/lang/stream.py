"""One line of a running program: expressions come in from any thread, a coroutine carries them out one by one.

A stream holds no thread and, while it has nothing to do, no task either. Branches are streams that begin with a copy of
their trunk. Knows nothing of the user's function, which only adds expressions and reads variables.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgray.errors import SgrayError
from sgray.lang.backend import Backend
from sgray.lang.choices import mean
from sgray.lang.errors import ProgramCancelledError
from sgray.lang.expressions import (
    Constant,
    Expression,
    Gen,
    RoleBegin,
    RoleEnd,
    Sampling,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    reasoning_name,
)
from sgray.lang.life import Life
from sgray.lang.primitives import value_of
from sgray.lang.transcript import Prompt, Transcript

IDLE_S = 0.02  # a program that adds nothing for so long is taken to wait for something
MIN_PREFETCH_CHARS = 256  # about a page of the cache on a GPU


@dataclass(frozen=True)
class Fork(Expression):
    """Branches begin here."""

    branches: tuple[Stream, ...]


@dataclass(frozen=True)
class Join(Expression):
    """What the branches have found comes back; with `appends` also what they have written."""

    branches: tuple[Stream, ...]
    appends: bool


@dataclass(frozen=True)
class News:
    """Something was written: a piece of the variable `name`, or, with `prompt`, all up to here."""

    name: str | None
    text: str
    prompt: Prompt | None = None


class Stream:
    """Carries out expressions in the order in which they came. Public methods may be called from any thread.

    `defaults` fill what a generation leaves open. With `is_streaming` texts come in pieces. `feeder` is the thread
    that may still add expressions, so that for others an idle stream has not ended. A branch has the `life` of its
    trunk.
    """

    def __init__(
        self, backend: Backend, defaults: Sampling, *, is_streaming: bool = False, life: Life | None = None
    ) -> None:
        is_branch = life is not None
        self.backend = backend
        self.life = life or Life(backend.end_program)
        self.defaults = defaults
        self.is_streaming = is_streaming
        self.transcript = Transcript()
        self.variables: dict[str, Any] = {}
        self.meta_info: dict[str, Any] = {}
        self.news: list[News] = []
        self.error: BaseException | None = None
        self.feeder: int | None = None
        self._inherited: frozenset[str] = frozenset()
        self._fork_at = 0
        self._scopes: dict[str, int] = {}
        self._branches: list[Stream] = []
        self.lock = threading.RLock()
        self._waiting: deque[Expression] = deque()
        self._pending: Counter[str] = Counter()
        self._is_trunk = not is_branch
        self._is_busy = is_branch  # held, until the trunk has come to where it begins
        self._known_chars = 0  # of what is written, that a request has brought into the cache
        self._idle_timer: asyncio.TimerHandle | None = None
        self._prefetching: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._watchers: list[tuple[Callable[[], bool], Future[None]]] = []

    # What programs call.

    def submit(self, expression: Expression) -> None:
        """Add an expression; after an error nothing more is done."""
        parts = expression.parts()
        with self.lock:
            if self.error is not None:
                return
            for part in parts:
                self._pending.update(part.names())
            self._waiting.extend(parts)
            is_first, self._is_busy = not self._is_busy, True
        if is_first:
            self.life.begin(self)
            self.backend.loop.call(self._start)

    def fork(self, size: int) -> list[Stream]:
        """`size` branches that begin when all that was added before is done."""
        branches = [
            Stream(self.backend, self.defaults, is_streaming=self.is_streaming, life=self.life) for _ in range(size)
        ]
        for branch in branches:
            self.life.begin(branch)
        with self.lock:
            self._branches += branches
            error = self.error
        for branch in branches if error is not None else ():
            branch.fail(error or ProgramCancelledError("the program was cancelled"))
        self.submit(Fork(tuple(branches)))
        return branches

    def set_variable(self, name: str, value: Any) -> None:
        """Give a variable a value."""
        with self.lock:
            self.variables[name] = value
        self._tell()

    def when(self, condition: Callable[[], bool]) -> Future[None]:
        """Done once the condition holds, which is judged under the lock, or once nothing can change it any more."""
        future: Future[None] = Future()
        with self.lock:
            if condition():
                future.set_result(None)
            else:
                self._watchers.append((condition, future))
        return future

    def when_idle(self) -> Future[None]:
        """Done once everything that was added is done, or the stream has failed."""
        return self.when(lambda: self.is_idle)

    def when_ended(self) -> Future[None]:
        """Done once nothing more will come that the caller does not add itself."""
        return self.when(self.ended())

    def when_known(self, name: str) -> Future[None]:
        """Done once the variable has its value, or will never get one."""
        ended = self.ended()
        return self.when(lambda: self.is_known(name) or ended())

    def ended(self) -> Callable[[], bool]:
        """Tells whether nothing more will come but what the thread adds that calls this now: it waits, so adds none."""
        reader = threading.get_ident()
        return lambda: self.error is not None or (not self._is_busy and self.feeder in (None, reader))

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._is_busy or self.error is not None

    def is_known(self, name: str) -> bool:
        """Whether the variable has the value that the expressions so far give it."""
        return name in self.variables and not self._pending[name]

    def end_feed(self) -> None:
        """Nobody will add expressions any more."""
        self.feeder = None
        self._tell()

    def cancel(self) -> None:
        """Stop what runs, here and in all branches; what is read from now on raises ProgramCancelledError."""
        self.fail(ProgramCancelledError("the program was cancelled"))

    def fail(self, error: BaseException) -> None:
        """Stop as `cancel` does, for a reason of the caller's."""
        self._end(error, stops=True)
        if self._is_trunk:
            self.life.abandon()

    # What runs on the loop.

    def _start(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while (expression := self._next()) is not None:
            try:
                await self._carry_out(expression)
            except asyncio.CancelledError:
                self._end(ProgramCancelledError("the program was cancelled"), stops=False)
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, who reads the program's results must get it
                self._end(error, stops=False)
                return
            with self.lock:
                self._pending.subtract(expression.names())
            self._tell()

    def _next(self) -> Expression | None:
        with self.lock:
            if self._waiting and self.error is None:
                return self._waiting.popleft()
            self._is_busy = False
        self._tell()
        self.life.finish(self)
        if self.life.is_in_body and len(self.transcript.written) - self._known_chars >= MIN_PREFETCH_CHARS:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._prefetch)
        return None

    def _prefetch(self) -> None:
        """The program waits for something else: have computed what it has written and will go on from."""
        if self._is_busy or self.error is not None or not self.life.is_in_body:
            return
        self._known_chars = len(self.transcript.written)
        work = self.backend.prefetch(self.transcript.prompt(), self.life.ask())
        self._prefetching = asyncio.get_running_loop().create_task(_in_silence(work))

    def _end(self, error: BaseException, *, stops: bool) -> None:
        """No expression is carried out any more. Branches that have not begun share the error; `stops` ends the others
        as well, and the request in hand.
        """
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            self._waiting.clear()
            tasks, branches = (self._task, self._prefetching), list(self._branches)
        for task in tasks if stops else ():
            if task is not None and not task.done():
                self.backend.loop.call(task.cancel)
        for branch in branches:
            if stops or not branch._has_begun:
                branch._end(error, stops=stops)
        self._tell()
        self.life.finish(self)

    @property
    def _has_begun(self) -> bool:
        return self._task is not None or not self._is_busy

    def _tell(self) -> None:
        """Wake those whose condition holds now."""
        with self.lock:
            ready = [future for condition, future in self._watchers if self.error is not None or condition()]
            self._watchers = [watcher for watcher in self._watchers if watcher[1] not in ready]
        for future in ready:
            if future.set_running_or_notify_cancel():  # a reader that was cancelled waits no more
                future.set_result(None)

    async def _carry_out(self, expression: Expression) -> None:
        if isinstance(expression, Constant):
            self._write(expression.text)
        elif isinstance(expression, Gen):
            await self._generate(expression, None)
        elif isinstance(expression, Select):
            await self._select(expression)
        elif isinstance(expression, RoleBegin):
            self._mark("begin", expression.role)
        elif isinstance(expression, RoleEnd):
            self._mark("end", expression.role)
        elif isinstance(expression, SeparateReasoning):
            await self._separate(expression)
        elif isinstance(expression, ScopeBegin):
            self._scopes[expression.name] = len(self.transcript.written)
        elif isinstance(expression, ScopeEnd):
            self.variables[expression.name] = self.transcript.written[self._scopes.pop(expression.name) :]
        elif isinstance(expression, Fork):
            for branch in expression.branches:
                branch._begin_from(self)
        else:
            assert isinstance(expression, Join), f"an unknown expression: {expression!r}"
            await self._join(expression)

    def _mark(self, kind: Any, role: str) -> None:
        self.transcript.play((kind, role))
        self._write("")

    def _write(self, text: str, name: str | None = None, *, is_told: bool = False) -> None:
        """Add text; `is_told` where its pieces were told already."""
        if text:
            self.transcript.play(("text", text))
        with self.lock:
            if name is not None and not is_told:
                self.news.append(News(name, text))
            self.news.append(News(name, text, self.transcript.prompt()))
        self._tell()

    def _hear(self, name: str | None, text: str) -> None:
        with self.lock:
            self.news.append(News(name, text))
        self._tell()

    async def _generate(self, gen: Gen, form: str | None) -> None:
        """`form` names how the model marks its reasoning, where that is to be told apart."""
        sampling = gen.sampling.over(self.defaults)
        is_streaming = self.is_streaming and form is None
        on_text = partial(self._hear, gen.name) if is_streaming else None
        answer = await self.backend.complete(self.transcript.prompt(), sampling, on_text, self.life.ask())
        has_many = (sampling.n or 1) > 1
        texts = answer.texts
        if form is not None:
            reasonings, texts = _split(texts, form)
            if gen.name is not None:
                self.variables[reasoning_name(gen.name)] = reasonings if has_many else reasonings[0]
        if gen.name is not None:
            values = [value_of(text, gen.dtype) if gen.dtype else text for text in texts]
            self.variables[gen.name] = values if has_many else values[0]
            self.meta_info[gen.name] = answer.meta_info if has_many else answer.meta_info[0]
        self._write(texts[0], gen.name, is_told=is_streaming)
        self._known_chars = len(self.transcript.written)

    async def _separate(self, expression: SeparateReasoning) -> None:
        for part in expression.inner.parts():
            if isinstance(part, Gen):
                await self._generate(part, expression.form)
            else:
                await self._carry_out(part)

    async def _select(self, select: Select) -> None:
        unconditional, name = select.method.requires_unconditional_logprobs, self.life.ask()
        prompt = self.transcript.prompt()
        scores = await self.backend.score_choices(prompt, select.choices, unconditional=unconditional, program=name)
        self._known_chars = len(self.transcript.written)
        decision = select.method(
            choices=list(select.choices),
            normalized_prompt_logprobs=[mean([entry[0] for entry in entries]) for entries in scores.conditional],
            input_token_logprobs=scores.conditional,
            output_token_logprobs=[[] for _ in select.choices],
            unconditional_token_logprobs=scores.unconditional,
        )
        if select.name is not None:
            self.variables[select.name] = decision.decision
            self.meta_info[select.name] = decision.meta_info
        self._write(decision.decision, select.name)

    def _begin_from(self, trunk: Stream) -> None:
        self.transcript, self._known_chars = trunk.transcript.copy(), trunk._known_chars
        self._fork_at = len(self.transcript.acts)
        with self.lock:
            self.variables = trunk.variables | self.variables
            self.meta_info = dict(trunk.meta_info)
            self._inherited = frozenset(trunk.variables)
            if self.error is not None:
                return
        self._start()

    async def _join(self, join: Join) -> None:
        """Take over the branches' new variables: as lists, and numbered by branch.

        Where a branch has failed, its error is the trunk's; the others' values are there by number.
        """
        for branch in join.branches:
            await asyncio.wrap_future(branch.when_idle())
        errors = [branch.error for branch in join.branches if branch.error is not None]
        lists: dict[str, list[Any]] = {}
        for number, branch in enumerate(join.branches):
            for name, value in branch._found().items():
                self.variables[f"{name}_{number}"] = value
                lists.setdefault(name, []).append(value)
        if errors:
            raise errors[0]
        self.variables |= lists
        if join.appends:
            for act in [act for branch in join.branches for act in branch.transcript.acts[branch._fork_at :]]:
                self.transcript.play(act)
            self._write("")

    def _found(self) -> dict[str, Any]:
        """The variables that are not from the trunk."""
        return {
            name: value
            for name, value in self.variables.items()
            if name not in self._inherited and not self._pending[name]
        }


async def _in_silence(work: Coroutine[Any, Any, None]) -> None:
    """Work that nobody waits for, and whose failure the next request will meet as well."""
    with suppress(SgrayError):
        await work


def _split(texts: list[str], form: str) -> tuple[list[str], list[str]]:
    """The reasoning and the answer of each text."""
    from sgray.text.reasoning import REASONING_FORMATS, ReasoningParser

    reasonings, answers = [], []
    for text in texts:
        parser = ReasoningParser(REASONING_FORMATS[form])
        splits = [parser.push(text), parser.finish()]
        reasonings.append("".join(split.reasoning for split in splits))
        answers.append("".join(split.content for split in splits))
    return reasonings, answers
