"""A deterministic model without weights that watches the engine: each page holds what a real one would depend on.

The "key-value entry" of a position is a hash of all tokens up to it. Before a step computes from position `start`, the
row of pages must hold exactly the entries of `[0, start)`; so a page that is shared, evicted, copied or given back
wrongly fails at once. The next token is a function of all tokens before it, the seed and its index alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgray.engine.plan import ON_DEVICE, Admission, StepPlan, StepResult
from sgray.engine.scheduler import Limits, Scheduler
from sgray.memory.cache import PrefixCache
from sgray.protocol import Delta, Finish, Request, SamplingParams, TokenLogprobs

VOCAB_SIZE = 1000
MASK = (1 << 61) - 1


def mix(state: int, value: int) -> int:
    return ((state ^ (value + 0x9E37)) * 0x9E3779B97F4A7C15 + (state >> 7)) & MASK


def draw(state: int, sampling: SamplingParams, seed: int, index: int, end_ids: Iterable[int]) -> int:
    """The token after `state`: forced by a bias, no end before `min_new_tokens`, random only if it is hot."""
    banned = set(end_ids) if index < sampling.min_new_tokens else set()
    biased = [token for token in sampling.logit_bias if token not in banned]
    if biased:
        return max(biased, key=lambda token: sampling.logit_bias[token])
    token = mix(state, mix(seed, index) if sampling.temperature > 0 else 0) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprob(state: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(-(mix(state, token) % 1000) / 100)


def solo(prompt: list[int], count: int, *, seed: int = 0, sampling: SamplingParams | None = None) -> list[int]:
    """What a request yields alone, without engine, cache or end."""
    sampling = sampling or SamplingParams(temperature=0)
    state, tokens = 0, []
    for token in prompt:
        state = mix(state, token)
    for index in range(count):
        tokens.append(draw(state, sampling, seed, index, ()))
        state = mix(state, tokens[-1])
    return tokens


@dataclass
class Slot:
    admission: Admission
    tokens: list[int]
    row: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # of the positions in self.tokens, as far as needed

    def state(self, position: int) -> int:
        while len(self.states) <= position:
            before = self.states[-1] if self.states else 0
            self.states.append(mix(before, self.tokens[len(self.states)]))
        return self.states[position]


class FakeExecutor:
    """Computes as late as it may: a plan when it is collected, after all that was planned in the meantime."""

    def __init__(self, num_pages: int, page_size: int, *, depth: int = 0) -> None:
        self.page_size = page_size
        self.depth = depth
        self.reads_shared = True
        self.pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.slots: dict[int, Slot] = {}
        self.submitted: deque[StepPlan] = deque()
        self.num_computed = 0
        self.plans: list[StepPlan] = []
        self.keep_plans = True
        self.bad_tokens: set[int] = set()  # a sequence that has one of them fails alone
        self.refuse = 0  # so many plans to come raise when they are submitted
        self.lost: str | None = None  # set when everything is lost outside of a step
        self.is_closed = False
        self.explode = 0  # so many steps to come raise when they are collected

    def submit(self, plan: StepPlan) -> None:
        if self.refuse:
            self.refuse -= 1
            raise RuntimeError("the launch failed")
        if self.keep_plans:
            self.plans.append(plan)
        self.submitted.append(plan)
        assert len(self.submitted) <= self.depth + 1

    def reset(self) -> None:
        while self.submitted:
            self.compute(self.submitted.popleft())  # a device does not stop for it

    def fault(self) -> str | None:
        return self.lost

    def close(self) -> None:
        self.is_closed = True

    def collect(self) -> StepResult:
        result = self.compute(self.submitted.popleft())
        if self.explode:
            self.explode -= 1
            raise RuntimeError("the device fell off the bus")
        return result

    def compute(self, plan: StepPlan) -> StepResult:
        for source, destination in plan.copies:
            self.pages[destination] = list(self.pages[source])
        for admission in plan.admissions:
            self.slots[admission.slot] = Slot(admission, list(admission.tokens))
        for number, place, page in plan.new_pages:
            assert place == len(self.slots[number].row)
            self.slots[number].row.append(page)
        result = StepResult(plan.step, [], [], [])
        assert len(set(plan.slots)) == len(plan.slots)
        self.check_shared(plan)
        flat = iter(plan.tokens)
        for index, number in enumerate(plan.slots):
            slot = self.slots[number]
            start, end = plan.starts[index], plan.starts[index] + plan.lengths[index]
            self.check_tokens(slot, start, [next(flat) for _ in range(start, end)])
            self.verify(slot, start)
            self.write(slot, start, end)
            if self.bad_tokens.intersection(slot.tokens[:end]):
                result.errors[index] = "logits are not finite"
            self.answer(slot, start, end, plan.samples[index], result)
        assert next(flat, None) is None
        return result

    def check_shared(self, plan: StepPlan) -> None:
        """Whoever shares a span has it in the same pages, computed, and everything before it is shared as well."""
        ends: dict[int, int] = {}
        for begin, end, members in plan.shared:
            assert 0 <= begin < end and begin % self.page_size == end % self.page_size == 0
            assert len(members) == len(set(members)) > 1
            places = slice(begin // self.page_size, end // self.page_size)
            rows = [self.slots[plan.slots[index]].row[places] for index in members]
            assert len(rows[0]) == places.stop - places.start and all(row == rows[0] for row in rows)
            for index in members:
                assert ends.get(index, 0) == begin and end <= plan.starts[index]
                ends[index] = end

    def check_tokens(self, slot: Slot, start: int, tokens: list[int]) -> None:
        """They are the slot's; only one that was drawn here, and is the last, may be left for us to know."""
        if tokens[-1] == ON_DEVICE:
            assert self.depth > 0 and start + len(tokens) == len(slot.tokens) > len(slot.admission.tokens)
            tokens = [*tokens[:-1], slot.tokens[-1]]
        assert tokens == slot.tokens[start : start + len(tokens)]

    def verify(self, slot: Slot, start: int) -> None:
        """The row holds the entries of `[0, start)`."""
        size = self.page_size
        slot.state(max(start - 1, 0))
        for place in range(-(-start // size)):
            low, high = place * size, min((place + 1) * size, start)
            assert self.pages[slot.row[place]][: high - low] == slot.states[low:high], "a page holds another's tokens"

    def write(self, slot: Slot, start: int, end: int) -> None:
        self.num_computed += end - start
        for position in range(start, end):
            self.pages[slot.row[position // self.page_size]][position % self.page_size] = slot.state(position)

    def answer(self, slot: Slot, start: int, end: int, samples: bool, result: StepResult) -> None:
        admission = slot.admission
        sampling, num_prompt = admission.sampling, admission.num_prompt
        token = -1
        if samples:
            assert end == len(slot.tokens)
            token = draw(
                slot.state(end - 1), sampling, admission.seed, len(slot.tokens) - num_prompt, admission.end_ids
            )
            slot.tokens.append(token)
        result.tokens.append(token)
        result.logprobs.append(logprob(slot.state(end - 1), token) if samples and sampling.logprobs >= 0 else None)
        result.prompt_logprobs.append(
            [logprob(slot.state(p - 1), slot.tokens[p]) for p in range(start + 1, min(end + 1, num_prompt))]
            if sampling.prompt_logprobs >= 0
            else None
        )


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: Finish | None = None
    cached: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the end"
        assert (delta.cached_tokens is not None) == (not self.deltas), "cached_tokens belong on the first delta alone"
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.tokens)
        self.deltas.append(delta)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.finish = delta.finish
        self.cached = delta.cached_tokens if delta.cached_tokens is not None else self.cached
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs


class Rig:
    """Scheduler, cache and fake model, driven by hand; checks the books after each act."""

    def __init__(
        self,
        *,
        num_pages: int = 256,
        page_size: int = 4,
        budget: int = 64,
        mixed: int | None = None,
        most_mixed: int = 0,
        max_running: int = 8,
        max_queued: int = 100,
        max_queued_tokens: int = 10**9,
        context: int = 8192,
        end_ids: tuple[int, ...] = (),
        policy: str = "fcfs",
        disabled: bool = False,
        random_seed: int | None = 0,
        checks: bool = True,
        lookahead: int = 64,
        depth: int = 0,
    ) -> None:
        self.now = 0.0
        self.cache = PrefixCache(num_pages, page_size, disabled=disabled)
        self.scheduler = Scheduler(
            self.cache,
            Limits(
                budget,
                mixed or budget,
                max_running,
                max_queued,
                max_queued_tokens,
                context,
                VOCAB_SIZE,
                end_ids,
                lookahead,
                min_saved=1,
                most_mixed_prefill=most_mixed,
            ),
            clock=lambda: self.now,
            policy=policy,
            random_seed=random_seed,
        )
        self.executor = FakeExecutor(num_pages, page_size, depth=depth)
        self.budget = budget
        self.outputs: dict[str, Output] = {}
        self.checks = checks

    def add(
        self,
        id: str,
        tokens: list[int],
        *,
        priority: int = 0,
        salt: str = "",
        timeout_s: float | None = None,
        program: str = "",
        trace_headers: dict[str, str] | None = None,
        **sampling: object,
    ) -> None:
        params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        more = {"timeout_s": timeout_s, "program": program, "trace_headers": trace_headers or {}}
        self.scheduler.add(Request(id, tokens, params, priority, salt, **more))  # type: ignore[arg-type]
        self.outputs[id] = Output()

    def abort(self, id: str) -> None:
        self.scheduler.abort(id)
        self.take(self.scheduler.drain())

    def step(self) -> StepPlan | None:
        """Plan a step, and answer the oldest one that is due."""
        self.now += 0.01
        plan = self.scheduler.schedule()
        if plan is not None:
            assert 0 < sum(plan.lengths) <= self.budget
            self.executor.submit(plan)
            self.take(self.scheduler.drain())
        if self.scheduler.num_in_flight > (self.executor.depth if plan else 0):
            self.scheduler.update(self.executor.collect())
        self.take(self.scheduler.drain())
        return plan

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.outputs[delta.id].take(delta)
        if self.checks:
            self.scheduler.check()

    def run(self, most: int = 100_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for count in range(most):
            if not self.scheduler.has_work and not self.scheduler.num_in_flight:
                return count
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def generate(self, id: str, tokens: list[int], **arguments: object) -> Output:
        """One request, run to its end."""
        self.add(id, tokens, **arguments)  # type: ignore[arg-type]
        self.run()
        return self.outputs[id]
