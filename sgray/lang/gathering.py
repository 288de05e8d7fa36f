"""Calls that are made together travel together: many small calls of branches become few large ones.

A branch's call costs its server little beyond the work it asks for, but a request of HTTP, or of a Serve handle, costs
milliseconds. So calls that come within `WINDOW_S` of each other are sent as one list, whose answers come back one by
one, each as soon as it is there. A call that comes alone is sent as it is, at once. One that fails in company is tried
again alone, so nobody gets another one's error; one that is cancelled is stopped by its name, without the others.

The one engine that stands in this process needs none of this.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from sgray.errors import SgrayError

Body = Mapping[str, Any]

WINDOW_S = 0.002
MAX_PROMPTS = 128  # in one call
MAX_CHARS = 2**20  # of all prompts of one call; more than one call's worth of text gains nothing by company
ONLY_AT_THE_END = 1_000_000  # tokens between two chunks
_ID_CHARS = 7  # of a token id in JSON

# What a call may say for all its prompts alone.
_SHARED = frozenset({"priority", "cache_salt", "return_text_in_logprobs"})
# What a list may say for each prompt, and what stands for silence.
_EACH: Mapping[str, Any] = {
    "sampling_params": {},
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": [],
    "program_id": "",
}


@dataclass(eq=False)
class _Member:
    """One call: its prompts, each with what the call says of it, and what is known of the answers."""

    body: Body
    prompts: list[Any]
    is_list: bool
    key: tuple[Any, ...]  # calls with equal keys can travel together
    answer: asyncio.Future[Any]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    found: dict[int, Any] = field(default_factory=dict)
    company: _Company | None = None

    @property
    def num_chars(self) -> int:
        """About how long the prompts are in JSON."""
        return sum(len(one) if isinstance(one, str) else _ID_CHARS * len(one) for one in self.prompts)

    def each(self, name: str) -> list[Any]:
        """The values of a field, one a prompt."""
        value = self.body.get(name, _EACH[name])
        is_spread = isinstance(value, list) and (name != "token_ids_logprob" or any(isinstance(v, list) for v in value))
        return list(value) if self.is_list and is_spread else [value] * len(self.prompts)

    def take(self, position: int, answer: Any) -> None:
        """One answer; the call has its own when it has all."""
        self.found[position] = answer
        if len(self.found) == len(self.prompts) and not self.answer.done():
            whole = [self.found[index] for index in range(len(self.prompts))]
            self.answer.set_result(whole if self.is_list else whole[0])


@dataclass(eq=False)
class _Company:
    """Calls that travel together."""

    members: list[_Member]
    task: asyncio.Task[None] | None = None


class Gathering:
    """Gathers calls of one kind; `send` carries a company, after which each call that has no answer is sent alone."""

    def __init__(
        self,
        send: Callable[[list[_Member]], Awaitable[None]],
        alone: Callable[[Body], Awaitable[Any]],
        abort: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        self._send = send
        self._alone = alone
        self._abort = abort
        self._waiting: list[_Member] = []
        self._last_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()  # a task that nobody holds may be collected

    async def call(self, body: Body, prompts: list[Any], *, is_list: bool, key: tuple[Any, ...]) -> Any:
        """The answer of a call."""
        loop = asyncio.get_running_loop()
        is_lonely = not self._waiting and loop.time() - self._last_s > WINDOW_S
        self._last_s = loop.time()
        if is_lonely:
            return await self._alone(body)
        member = _Member(body, prompts, is_list, key, loop.create_future())
        if not self._waiting:
            loop.call_later(WINDOW_S, self._depart)
        self._waiting.append(member)
        try:
            return await member.answer
        except asyncio.CancelledError:
            self._leave(member)
            raise

    def _depart(self) -> None:
        waiting, self._waiting = self._waiting, []
        for members in _companies(waiting):
            company = _Company(members)
            for member in members:
                member.company = company
            company.task = self._task(self._carry(members))

    async def _carry(self, members: list[_Member]) -> None:
        if len(members) > 1:
            with suppress(SgrayError):
                await self._send(members)
        for member in members:
            if not member.answer.done():
                self._start(self._carry_alone(member))

    async def _carry_alone(self, member: _Member) -> None:
        work = asyncio.ensure_future(self._alone(member.body))
        member.answer.add_done_callback(lambda _: work.cancel())
        try:
            answer = await work
        except asyncio.CancelledError:
            member.answer.cancel()
        except Exception as error:  # noqa: BLE001 - it is the caller's, who waits for it
            if not member.answer.done():
                member.answer.set_exception(error)
        else:
            if not member.answer.done():
                member.answer.set_result(answer)

    def _leave(self, member: _Member) -> None:
        """A caller is gone: stop what was sent for it, and the whole call where nobody else waits for one."""
        if member in self._waiting:
            self._waiting.remove(member)
        company = member.company
        if company is None or company.task is None or company.task.done():
            return
        if all(one.answer.done() for one in company.members):
            company.task.cancel()
        else:
            self._start(self._stop(member.name))

    async def _stop(self, name: str) -> None:
        with suppress(SgrayError):
            await self._abort(name)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        _ = self._task(work)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class GatheringTransport:
    """A transport whose generations and tokenisations travel together; everything else goes as it comes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._generations = Gathering(self._generate, self._alone("generate"), inner.abort)
        self._tokenisations = Gathering(self._tokenize, self._alone("tokenize"), _nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, name: str, body: Body) -> Any:
        """See Transport."""
        kind = next((one for one in ("input_ids", "text") if one in body), None)
        key: tuple[Any, ...]
        if name == "generate" and kind is not None and _is_sociable(body, kind):
            prompts, is_list = _prompts(body[kind])
            key = (kind, *sorted((other, body[other]) for other in _SHARED & body.keys()))
            return await self._generations.call(body, prompts, is_list=is_list, key=key)
        if name == "tokenize" and "prompt" in body:
            prompts, is_list = _prompts(body["prompt"])
            key = ("prompt", body.get("add_special_tokens"))
            return await self._tokenisations.call(body, prompts, is_list=is_list, key=key)
        return await self._inner.call(name, body)

    def stream(self, body: Body) -> AsyncIterator[dict[str, Any]]:
        """See Transport."""
        chunks: AsyncIterator[dict[str, Any]] = self._inner.stream(body)
        return chunks

    def _alone(self, name: str) -> Callable[[Body], Awaitable[Any]]:
        return lambda body: self._inner.call(name, body)

    async def _generate(self, members: list[_Member]) -> None:
        kind, *rest = members[0].key
        places = [(member, position) for member in members for position in range(len(member.prompts))]
        body = dict(rest) | {name: [value for member in members for value in member.each(name)] for name in _EACH}
        body |= {
            kind: [prompt for member in members for prompt in member.prompts],
            "rid": [f"{member.name}_{position}" for member, position in places],
            "sampling_params": [dict(one, stream_interval=ONLY_AT_THE_END) for one in body["sampling_params"]],
            "stream": True,
        }
        async with aclosing(self._inner.stream(body)) as chunks:
            async for chunk in chunks:
                if chunk["meta_info"]["finish_reason"] is not None:
                    member, position = places[chunk.pop("index")]
                    member.take(position, chunk)

    async def _tokenize(self, members: list[_Member]) -> None:
        body = {**members[0].body, "prompt": [prompt for member in members for prompt in member.prompts]}
        rows = iter((await self._inner.call("tokenize", body))["tokens"])
        for member in members:
            tokens = [next(rows) for _ in member.prompts]
            if not member.answer.done():
                member.answer.set_result({"tokens": tokens if member.is_list else tokens[0]})


async def _nothing(name: str) -> None:
    """A tokenisation is over before it could be stopped."""


def _prompts(value: Any) -> tuple[list[Any], bool]:
    """The prompts of a field, and whether it is a list of them."""
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    return (list(value), True) if is_list else ([value], False)


def _is_sociable(body: Body, kind: str) -> bool:
    """Whether a call can be a part of a list: all that it says can be said there, and there is one answer a prompt."""
    if not body.keys() <= {kind, *_SHARED, *_EACH}:
        return False
    sampling = body.get("sampling_params") or {}
    return all(one.get("n") in (None, 1) for one in (sampling if isinstance(sampling, list) else [sampling]))


def _companies(members: Sequence[_Member]) -> list[list[_Member]]:
    """Those that can travel together, in order, in calls that are not too large."""
    companies: list[list[_Member]] = []
    open_ones: dict[tuple[Any, ...], tuple[list[_Member], int, int]] = {}
    for member in members:
        company, num_prompts, num_chars = open_ones.get(member.key, ([], 0, 0))
        num_prompts, num_chars = num_prompts + len(member.prompts), num_chars + member.num_chars
        if not company or num_prompts > MAX_PROMPTS or num_chars > MAX_CHARS:
            company, num_prompts, num_chars = [], len(member.prompts), member.num_chars
            companies.append(company)
        company.append(member)
        open_ones[member.key] = (company, num_prompts, num_chars)
    return companies
