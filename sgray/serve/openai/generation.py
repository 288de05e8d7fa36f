"""A checked call is run: one request a choice, their pieces merged, counted and timed, everything aborted together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from sgray.errors import EngineError, RequestTimeoutError, SgrayError
from sgray.protocol import NO_LOGPROBS, Delta, Request, SamplingParams, Usage
from sgray.serve.call_names import request_id
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.choices import Choice, Piece
from sgray.serve.openai.constraints import Held
from sgray.serve.openai.metrics import ApiMetrics, CallMeter
from sgray.serve.openai.prompts import Prompt
from sgray.serve.openai.sampling import TextOptions, choice_seed
from sgray.text.token_ids import TextCodec

Pieces = AsyncGenerator[tuple[Choice, Piece], None]
ResultT = TypeVar("ResultT")
Outcome = Literal["unfinished", "finished", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call: `n` choices for each prompt.

    `sampling[i]` and `text[i]` belong to prompt i, as does `grammars[i]` where there are any. `names` are what the
    caller calls the choices, if it does, and `programs` what the prompts are parts of. `keeps_aborted` as in a choice.
    `computes_prompts`: an answer of no tokens leaves its prompt in the prefix cache.
    """

    id: str
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    text: list[TextOptions]
    n: int = 1
    echo: bool = False
    names: Sequence[str] = ()
    keeps_aborted: bool = False
    salt: str = ""
    priority: int = 0
    grammars: Sequence[Held | None] = ()
    programs: Sequence[str] = ()
    computes_prompts: bool = False


class Generation:
    """One run of a call. `pieces()` may be read once; closing it aborts what still runs."""

    def __init__(
        self, call: Call, backend: Backend, tokenizer: TextCodec, metrics: ApiMetrics, timeout_s: float | None
    ) -> None:
        self.call = call
        self._backend = backend
        self._metrics = metrics
        self._timeout_s = timeout_s
        self.first_token: float | None = None  # when it came, of the monotonic clock
        self.replica: str | None = None  # where the choice that began first was computed, if that is known
        self.outcome: Outcome = "unfinished"
        self.trace_headers: dict[str, str] = {}  # go with every request
        self.choices = [self._choice(index, tokenizer) for index in range(len(call.prompts) * call.n)]

    def _choice(self, index: int, tokenizer: TextCodec) -> Choice:
        call, prompt = self.call, index // self.call.n
        return Choice(
            index,
            call.prompts[prompt],
            call.sampling[prompt],
            call.text[prompt],
            tokenizer,
            echo=call.echo,
            keeps_aborted=call.keeps_aborted,
        )

    def usage(self) -> Usage:
        """Token counts so far. A prompt counts once however many choices it has; the one choice that found the
        least of it in the cache computed the rest for its siblings."""
        n = self.call.n
        groups = [self.choices[start : start + n] for start in range(0, len(self.choices), n)]
        return Usage(
            prompt_tokens=sum(group[0].num_prompt for group in groups),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(min(choice.cached_tokens for choice in group) for group in groups),
        )

    def num_used(self) -> int:
        """Tokens that the engine worked on for the caller so far: none before it has drawn the first one."""
        usage = self.usage()
        return usage.prompt_tokens + usage.completion_tokens if self.first_token is not None else 0

    async def pieces(self) -> Pieces:
        """The pieces of all choices as they come, the last of each with its finish reason."""
        meter = self._metrics.call()
        try:
            async with aclosing(self._merged(meter) if self._timeout_s is None else self._timed(meter)) as pieces:
                async for choice, piece in pieces:
                    yield choice, piece
        except (GeneratorExit, asyncio.CancelledError):
            self.outcome = "aborted"
            meter.aborted(self.usage())
            raise
        except BaseException:
            self.outcome = "failed"
            meter.failed(self.usage())
            raise
        self.outcome = "finished"
        meter.finished(self.usage())

    async def _timed(self, meter: CallMeter) -> Pieces:
        """The merged pieces, until the deadline."""
        async with aclosing(self._merged(meter)) as pieces:
            assert self._timeout_s is not None
            deadline = time.monotonic() + self._timeout_s
            try:
                while True:
                    yield await within(deadline - time.monotonic(), pieces.__anext__())
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise RequestTimeoutError(
                    f"The request took longer than the server's limit of {self._timeout_s:g} s and was stopped. "
                    "Ask for fewer tokens, or raise api.request_timeout_s."
                ) from None

    def _merged(self, meter: CallMeter) -> Pieces:
        """The pieces of all choices; those of a single one as they are, since every layer is paid for each token."""
        sources = [self._read(choice, meter) for choice in self.choices]
        return sources[0] if len(sources) == 1 else _merge(sources)

    async def _read(self, choice: Choice, meter: CallMeter) -> Pieces:
        """The pieces of one choice. Leaving early, also at a stop string, aborts the engine's request."""
        sampling = self.call.sampling[choice.index // self.call.n]
        if sampling.max_new_tokens == 0 and not self._needs_prompt(choice, sampling):
            yield choice, choice.empty()
            return
        async with aclosing(self._backend.submit(self._request(choice.index, sampling))) as deltas:
            async for delta in deltas:
                if self.first_token is None and delta.tokens:
                    self._begin(choice.index)
                before = choice.num_tokens
                piece = self._fed(choice, delta)
                meter.received(choice.index, choice.num_tokens - before)
                if piece is not None:
                    yield choice, piece
                if choice.is_finished:
                    return
        raise EngineError("the engine's answer broke off without a reason")

    def _begin(self, index: int) -> None:
        self.first_token = time.monotonic()
        self.replica = self._backend.history.replica_of(self._id(index))

    def _needs_prompt(self, choice: Choice, sampling: SamplingParams) -> bool:
        """Whether the engine has something to do for an answer of no tokens, and room to do it."""
        has_room = choice.num_prompt < self._backend.info.context_length
        return sampling.prompt_logprobs != NO_LOGPROBS or (self.call.computes_prompts and has_room)

    def _fed(self, choice: Choice, delta: Delta) -> Piece | None:
        """What a choice makes of a delta. Of a grammar the engine knows its kind alone, not the caller's field."""
        held = self._held(choice.index)
        try:
            return choice.feed(delta)
        except SgrayError as error:
            if held is not None and error.param in (held.grammar.kind, "response_format"):
                error.param = held.param
            raise

    def _held(self, index: int) -> Held | None:
        return self.call.grammars[index // self.call.n] if self.call.grammars else None

    def _id(self, index: int) -> str:
        return request_id(self.call.id, index, self.call.names[index] if self.call.names else "")

    def _request(self, index: int, sampling: SamplingParams) -> Request:
        """The engine's request; an answer of no tokens still takes the step that computes its prompt."""
        call, held = self.call, self._held(index)
        return Request(
            id=self._id(index),
            tokens=call.prompts[index // call.n].tokens,
            sampling=replace(
                sampling,
                max_new_tokens=max(1, sampling.max_new_tokens),
                seed=choice_seed(sampling.seed, index % call.n),
            ),
            priority=call.priority,
            salt=call.salt,
            grammar=None if held is None else held.grammar,
            timeout_s=self._timeout_s,
            program=call.programs[index // call.n] if call.programs else "",
            trace_headers=self.trace_headers,
        )


async def within(seconds: float, work: Awaitable[ResultT]) -> ResultT:
    """The result of `work`, which is cancelled and has ended when this raises TimeoutError or is cancelled itself.

    `asyncio.wait_for` is no substitute: before Python 3.12 it swallows a cancellation that comes with the result.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            await _cancel([task])


async def _merge(sources: Sequence[Pieces]) -> Pieces:
    """Items of all sources as they come. A slow reader holds the sources back; the first error ends all."""
    queue: asyncio.Queue[tuple[Choice, Piece] | BaseException | None] = asyncio.Queue(maxsize=len(sources))
    async with AsyncExitStack() as stack:
        tasks = [asyncio.ensure_future(_pump(source, queue)) for source in sources]
        stack.push_async_callback(_cancel, tasks)
        num_open = len(tasks)
        while num_open:
            received = await queue.get()
            if received is None:
                num_open -= 1
            elif isinstance(received, BaseException):
                raise received
            else:
                yield received


async def _pump(source: Pieces, queue: asyncio.Queue[tuple[Choice, Piece] | BaseException | None]) -> None:
    """Everything of one source into the queue, then its end or its error."""
    try:
        async with aclosing(source) as items:
            async for item in items:
                await queue.put(item)
    except Exception as error:  # noqa: BLE001 - carried to the reader, who raises it
        await queue.put(error)
    else:
        await queue.put(None)


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel and wait, so that every source is closed when this returns."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
