"""The order of work: which sequences run, and how many tokens of each the next step computes.

Knows tokens, pages and counts; no torch, no thread, no text. `schedule` gives a plan, `update` takes its result. Time
is read from a clock that is handed in, and decides nothing but the age cap of one policy and the measured speeds.

The bound on progress. A step computes at most `token_budget` tokens. While there are both decoding sequences and
prompts to compute, decoding sequences get at most `D = budget - max(1, budget // 4)` of them and prompts the rest.
Those served longest ago go first, so a decoding sequence gets a token at least once in every `ceil(max_running / D)`
steps, which is every step when `max_running <= D`, however many prompts arrive; and the first prompt in the running
order moves on in every step. (A prompt of which one token is left counts as decoding.)
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from sgray.engine.metrics import StepSpeed
from sgray.engine.plan import Admission, StepPlan, StepResult
from sgray.engine.policy import choose_order, running_rank, waiting_rank
from sgray.engine.sequence import NO_SLOT, PREFIX_WAIT, Sequence, failure
from sgray.errors import ContextLengthError, EngineError, InvalidRequestError, OverloadedError, SgrayError
from sgray.memory.cache import KVLease, PrefixCache
from sgray.protocol import Delta, Finish, Load, Request, TokenLogprobs, namespace_key

MAX_LOOKAHEAD = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may do at most, and the facts of the model that bound a request.

    `min_lookahead`: tokens of output that each sequence must have room for when another one is let in.
    """

    token_budget: int
    max_running: int
    max_queued: int
    context_length: int
    vocab_size: int
    end_ids: tuple[int, ...] = ()
    min_lookahead: int = 64


@dataclass(slots=True)
class _Step:
    """A step in the making: the tokens still to give out, and how many each sequence got, in batch order."""

    budget: int
    chosen: dict[Sequence, int] = field(default_factory=dict)
    admissions: list[Sequence] = field(default_factory=list)

    def give(self, sequence: Sequence, count: int) -> None:
        self.chosen[sequence] = count
        self.budget -= count

    def withdraw(self, sequence: Sequence) -> None:
        self.budget += self.chosen.pop(sequence, 0)


class Scheduler:
    """Sequences that wait, sequences that run, and the plan between them. All methods are for one thread."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        *,
        clock: Callable[[], float],
        policy: str = "fcfs",
        random_seed: int | None = None,
    ) -> None:
        assert limits.token_budget > 1 and limits.max_running > 0, limits
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._order = choose_order(policy, self._num_known)
        self._random = random.Random(random_seed)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # sorted by waiting_rank
        self._running: list[Sequence] = []  # sorted by running_rank
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._planned: list[Sequence] = []
        self._deltas: list[Delta] = []
        self._num_added = 0
        self._step = 0
        self._started = 0.0
        self._lookahead = limits.min_lookahead
        self._speed = StepSpeed()
        self._totals = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "generation_tokens", "requests", "aborted", "retracted", "refused"), 0
        )

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a delta not yet drained."""
        return bool(self._sequences or self._deltas)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is unfinished."""
        return not self._sequences

    def add(self, request: Request) -> None:
        """Take a request into the queue; raises the SgrayError that it must be refused with."""
        try:
            self._validate(request)
        except SgrayError:
            self._totals["refused"] += 1
            raise
        self._totals["requests"] += 1
        sequence = self._sequence(request)
        self._sequences[request.id] = sequence
        if request.sampling.max_new_tokens == 0 and sequence.prompt_logprobs is None:
            self._finish(sequence, Finish("length"))
            return
        self._enqueue(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; unknown and finished ones are none of our business."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._totals["aborted"] += 1
            self._finish(sequence, Finish("abort"))

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now. The answer goes to `update`, or `fail`."""
        self._started = self._clock()
        self._lookahead = max(self._limits.min_lookahead, self._lookahead - 1)
        step = _Step(self._limits.token_budget)
        self._continue_running(step)
        self._admit(step)
        self._planned = list(step.chosen)
        return self._plan(step) if step.chosen else None

    def update(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Take in what the last plan computed; returns all deltas not yet drained."""
        assert plan.step == result.step == self._step, (plan.step, result.step, self._step)
        for index, sequence in enumerate(self._planned):
            if sequence.finish is not None:
                continue  # aborted since
            if message := result.errors.get(index):
                self._fail(sequence, EngineError(message))
            else:
                self._advance(sequence, plan, result, index)
        self._planned = []
        num_decode = sum(length == 1 for length in plan.lengths)
        num_prefill = sum(plan.lengths) - num_decode
        self._speed.record(self._clock() - self._started, num_prefill, num_decode)
        return self.drain()

    def fail(self, error: SgrayError) -> None:
        """The last plan could not be executed: end the sequences in it, and trust nothing that they computed."""
        for sequence in self._planned:
            if sequence.finish is None:
                self._fail(sequence, error)
        self._planned = []

    def fail_all(self, error: SgrayError) -> None:
        """End every sequence, running or waiting."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)
        self._planned = []

    def drain(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def load(self) -> Load:
        """What there is to do, how full the memory is, and the totals so far."""
        cache = self._cache
        prefilling = sum(s.num_remaining for s in self._running if s.num_remaining > 1)
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=prefilling + sum(s.num_uncached for s in self._waiting),
            resident_tokens=sum(s.num_computed for s in self._running),
            total_pages=cache.num_pages,
            free_pages=cache.num_free,
            cached_pages=cache.num_evictable,
            leased_pages=cache.num_leased,
            steps=self._step,
            last_step_s=self._speed.last_step_s,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            decode_step_s=self._speed.decode_step_s,
            **self._totals,
        )

    def check(self) -> None:
        """Prove that pages, slots and queues agree; AssertionError if they do not."""
        self._cache.check()
        slots = sorted([*self._free_slots, *(s.slot for s in self._running)])
        assert slots == list(range(self._limits.max_running)), f"slots are lost or shared: {slots}"
        assert self._running == sorted(self._running, key=running_rank), "running sequences are out of order"
        assert self._waiting == sorted(self._waiting, key=waiting_rank), "waiting sequences are out of order"
        assert {*self._running, *self._waiting} == {*self._sequences.values()}, "a sequence is lost"
        assert len(self._running) + len(self._waiting) == len(self._sequences), "a sequence runs and waits"
        assert all(s.lease is None and s.num_computed == 0 for s in self._waiting), "a waiting sequence holds pages"
        assert self._cache.num_leases == len(self._running), "a lease has no running sequence"

    def _validate(self, request: Request) -> None:
        limits, sampling, num_prompt = self._limits, request.sampling, len(request.tokens)
        if request.id in self._sequences:
            raise InvalidRequestError(f"a request with the id {request.id!r} is in work already; use a new id")
        if num_prompt == 0:
            raise InvalidRequestError("the prompt has no tokens; give at least one", param="prompt")
        if num_prompt + sampling.max_new_tokens > limits.context_length:
            raise ContextLengthError(
                f"the model has a context of {limits.context_length} tokens, but the prompt has {num_prompt} tokens "
                f"and {sampling.max_new_tokens} more were asked for ({num_prompt + sampling.max_new_tokens} in all); "
                "shorten the prompt or ask for fewer tokens",
                param="prompt" if num_prompt >= limits.context_length else "max_tokens",
            )
        capacity = self._cache.num_pages * self._cache.page_size
        if num_prompt > capacity:
            raise ContextLengthError(
                f"the key-value memory holds {capacity} tokens, but the prompt has {num_prompt} tokens; "
                "shorten the prompt, or give the server more memory (memory.max_total_tokens)",
                param="prompt",
            )
        self._validate_ids(request)
        if len(self._waiting) - len(self._free_slots) >= limits.max_queued:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting and the queue holds {limits.max_queued}; try again later"
            )

    def _validate_ids(self, request: Request) -> None:
        """What indexes the vocabulary must lie in it: one bad id would take the whole batch down."""
        sampling, vocab_size = request.sampling, self._limits.vocab_size
        for name, ids in (
            ("prompt", request.tokens),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                bad = next(token for token in ids if not 0 <= token < vocab_size)
                raise InvalidRequestError(
                    f"{name} has the token id {bad}, but the vocabulary has {vocab_size} ids, from 0", param=name
                )
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if count > vocab_size:
                raise InvalidRequestError(
                    f"{name} is {count}, but the vocabulary has {vocab_size} tokens; ask for fewer", param=name
                )

    def _sequence(self, request: Request) -> Sequence:
        sampling = request.sampling
        namespace = namespace_key(salt=request.salt)
        self._num_added += 1
        drawn = self._random.getrandbits(63)  # drawn for every request, so one that brings a seed shifts no other
        return Sequence(
            request,
            number=self._num_added,
            arrival=self._clock(),
            seed=drawn if sampling.seed is None else sampling.seed,
            namespace=namespace,
            hashes=self._cache.hashes(request.tokens, namespace),
            max_length=len(request.tokens) + sampling.max_new_tokens,
            stop_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._limits.end_ids),
        )

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.num_uncached = len(sequence.tokens) - self._num_known(sequence)
        self._await_prefix(sequence)
        insort(self._waiting, sequence, key=waiting_rank)

    def _num_known(self, sequence: Sequence) -> int:
        return self._cache.num_known(sequence.hashes, sequence.max_cached)

    # ---- one step: what goes on

    def _continue_running(self, step: _Step) -> None:
        ready = [s for s in self._running if not s.waits]
        decoding = [s for s in ready if s.num_remaining == 1]
        prefilling = [s for s in ready if s.num_remaining != 1]
        has_prefill = bool(prefilling or (self._waiting and self._free_slots))
        most = step.budget - max(1, step.budget // 4) if has_prefill else step.budget
        if len(decoding) > most:
            decoding = sorted(sorted(decoding, key=lambda s: s.last_step)[:most], key=running_rank)
        for sequence in decoding + prefilling:
            if sequence.slot == NO_SLOT:
                continue  # retracted for the sake of an earlier one
            count = min(sequence.num_remaining, step.budget)
            if count and self._secure(sequence, count, step):
                step.give(sequence, count)

    def _secure(self, sequence: Sequence, count: int, step: _Step) -> bool:
        """Pages for `count` more tokens, if need be by retracting the youngest, which may be the sequence itself."""
        lease = sequence.lease
        assert lease is not None
        while not self._cache.grow(lease, sequence.num_computed + count):
            victim = self._running[-1]
            if len(self._running) == 1 and not lease.duplicates:  # alone, it has used up the whole memory; with
                self._finish(sequence, Finish("length"))  # duplicates it need only start again from the tree's pages
                return False
            step.withdraw(victim)
            self._retract(victim)
            if victim is sequence:
                return False
        return True

    def _retract(self, sequence: Sequence) -> None:
        """Back to the queue. Its whole pages were committed as they were computed: they stay until they are evicted."""
        self._totals["retracted"] += 1
        self._lookahead = min(2 * self._lookahead + 1, MAX_LOOKAHEAD)
        self._leave(sequence)
        sequence.is_retracted = True
        sequence.num_computed = 0
        self._enqueue(sequence)

    # ---- one step: who comes in

    def _admit(self, step: _Step) -> None:
        """Let sequences in, in order, until slots, budget or memory end; a small one does not overtake a large one."""
        if not self._waiting or not self._free_slots or not step.budget:
            return
        reserved = sum(self._num_reserved(s, s.lease) for s in self._running)
        for sequence in list(self._order(self._waiting, self._started)):
            if not self._free_slots or not step.budget:
                return
            if not self._is_ready(sequence):
                continue
            lease = self._cache.acquire(
                sequence.tokens, sequence.namespace, limit=sequence.max_cached, hashes=sequence.hashes
            )
            count = min(len(sequence.tokens) - lease.num_cached, step.budget)
            if not self._fits(sequence, lease, reserved) or not self._cache.grow(lease, lease.num_cached + count):
                self._cache.release(lease)
                if self._running or not self._finish_if_impossible(sequence):
                    return
                continue
            self._place(sequence, lease)
            step.give(sequence, count)
            step.admissions.append(sequence)
            reserved += self._num_reserved(sequence, lease)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether nothing is waited for; a prefix that a running sequence computes now is worth a wait."""
        if sequence.awaited_page is not None:
            if self._cache.is_promised(sequence.awaited_page):
                return False
            sequence.awaited_page = None
            sequence.waits.discard(PREFIX_WAIT)
        if sequence.waits:
            return False
        return not self._await_prefix(sequence)

    def _await_prefix(self, sequence: Sequence) -> bool:
        """Let it wait for the last page that a running sequence computes now and it could hit, if there is one."""
        page = sequence.awaited_page = self._cache.awaited(sequence.hashes, sequence.max_cached)
        if page is None:
            return False
        sequence.waits.add(PREFIX_WAIT)
        sequence.num_uncached = len(sequence.tokens) - (sequence.hashes.index(page) + 1) * self._cache.page_size
        return True

    def _fits(self, sequence: Sequence, lease: KVLease, reserved: int) -> bool:
        """Whether memory suffices: for its tokens if it runs alone, else for all and what they are likely to add."""
        if not self._running:
            missing = self._cache.pages_for(len(sequence.tokens)) - len(lease.pages)
            return missing <= self._cache.num_available
        return reserved + self._num_reserved(sequence, lease) <= self._cache.num_available

    def _num_reserved(self, sequence: Sequence, lease: KVLease | None) -> int:
        """Pages that a sequence does not have yet and is likely to need before long.

        The look ahead doubles with each retraction and sinks by a token a step, so trouble with memory ends soon.
        """
        assert lease is not None
        likely = min(len(sequence.tokens) + self._lookahead, sequence.max_length)
        return max(0, self._cache.pages_for(likely) - len(lease.pages))

    def _finish_if_impossible(self, sequence: Sequence) -> bool:
        """End a retracted sequence that has outgrown the whole memory."""
        if self._cache.pages_for(len(sequence.tokens)) <= self._cache.num_pages:
            return False
        self._finish(sequence, Finish("length"))
        return True

    def _place(self, sequence: Sequence, lease: KVLease) -> None:
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=running_rank)
        sequence.slot = self._free_slots.pop()
        sequence.lease = lease
        sequence.num_computed = lease.num_cached
        sequence.num_sent_pages = 0
        if sequence.num_cached is None:
            sequence.num_cached = lease.num_cached
            self._totals["prompt_tokens"] += sequence.num_prompt
            self._totals["cached_tokens"] += lease.num_cached

    def _plan(self, step: _Step) -> StepPlan:
        self._step += 1
        plan = StepPlan(self._step, admissions=[self._admission(s) for s in step.admissions])
        for sequence, count in step.chosen.items():
            lease, start = sequence.lease, sequence.num_computed
            assert lease is not None
            if lease.copy is not None and (copy := self._cache.take_copy(lease)):
                plan.copies.append(copy)
            end = start + count
            plan.slots.append(sequence.slot)
            plan.starts.append(start)
            plan.lengths.append(count)
            plan.samples.append(end == len(sequence.tokens) and sequence.may_grow)
            plan.new_pages.append(lease.pages[sequence.num_sent_pages :])
            plan.tokens.extend(sequence.tokens[start:end])
            sequence.num_sent_pages = len(lease.pages)
            sequence.last_step = self._step
        return plan

    def _admission(self, sequence: Sequence) -> Admission:
        return Admission(
            sequence.slot,
            sequence.request.sampling,
            sequence.seed,
            sequence.num_prompt,
            list(sequence.tokens),
            tuple(sorted(sequence.stop_ids)),
        )

    # ---- after a step

    def _advance(self, sequence: Sequence, plan: StepPlan, result: StepResult, index: int) -> None:
        sequence.collect_prompt_logprobs(plan.starts[index], result.prompt_logprobs[index])
        sequence.num_computed += plan.lengths[index]
        lease = sequence.lease
        assert lease is not None
        if sequence.num_computed // self._cache.page_size > lease.num_committed:
            self._cache.commit(lease, sequence.tokens, sequence.num_computed)
        if plan.samples[index]:
            self._draw(sequence, result.tokens[index], result.logprobs[index])
        elif sequence.num_remaining == 0:
            self._finish(sequence, Finish("length"))  # nothing was to be drawn

    def _draw(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        sequence.accept(token)
        self._totals["generation_tokens"] += 1
        self._deltas.append(sequence.delta([token], [] if logprobs is None else [logprobs]))
        if sequence.finish is not None:
            self._remove(sequence)

    def _fail(self, sequence: Sequence, error: SgrayError) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease, is_poisoned=True)
        self._finish(sequence, failure(error))

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence without a new token."""
        sequence.finish = finish
        self._deltas.append(sequence.delta([], []))
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        if sequence.slot != NO_SLOT:
            self._leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and pages back."""
        assert sequence.lease is not None
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._cache.release(sequence.lease)
        sequence.slot, sequence.lease = NO_SLOT, None
