"""The order of work: which sequences run, and how many tokens of each the next step computes.

Knows tokens, pages and counts; no torch, no thread, no text. `schedule` gives a plan, `update` takes the result of the
oldest plan; between the two, one more may be planned. Time is read from a clock that is handed in, and decides nothing
but the age cap of one policy and the measured speeds.

The bound on progress. A step computes at most `token_budget` tokens. While there are both decoding sequences and
prompts to compute, decoding sequences get at most `D = budget - max(1, budget // 4)` of them and prompts the rest, but
not more than `Limits.mixed`. Those served longest ago go first, so a decoding sequence gets a token at least once in
every `ceil(max_running / D)` steps, which is every step when `max_running <= D`, however many prompts arrive; and the
first prompt in the running order moves on in every step, by at least `min(mixed_prefill, max(1, budget // 4))` tokens
or what is left of it. (A prompt of which one token is left counts as decoding.)

What is in flight. A sequence's counts move on when a step is planned; what the step found out is taken in when it is
answered: drawn tokens, ends, and the pages that others may share, whose tokens are then known and computed. A sequence
may end, or be retracted, while a step that computes it is in flight: its pages and its slot go to others at once,
because the executor does everything in the order of the plans, so what that step still writes lies before whatever a
new owner writes. What it answers for the old owner is not looked at: each run of a sequence has a lease of its own, and
a row counts only while the sequence still has the lease that it was planned with.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from sgray.engine.metrics import StepSpeed
from sgray.engine.plan import ON_DEVICE, Admission, StepPlan, StepResult
from sgray.engine.policy import choose_order, running_rank, waiting_rank
from sgray.engine.queueing import QueuedTokens, give_way, is_late, retry_after
from sgray.engine.sequence import GRAMMAR_WAIT, NO_SLOT, PREFIX_WAIT, Matcher, Sequence, failure
from sgray.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    SgrayError,
)
from sgray.memory.cache import KVLease, PrefixCache
from sgray.memory.sharing import shared_spans
from sgray.protocol import (
    MAX_END_IDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_IDS,
    Delta,
    Finish,
    Load,
    Request,
    Trail,
    namespace_key,
)

MAX_LOOKAHEAD = 4096
DRAIN_STEPS = 16
PROGRAM_SILENCE_S = 300.0  # without a request that ended; who forgot to say that a program has ended is not waited for


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may do at most, and the facts of the model that bound a request.

    `max_queued` requests may wait beside those that find a slot, with `max_queued_tokens` tokens to compute.
    `mixed_prefill`: the most prompt tokens in a step that has a decoding sequence in it; where more than `DRAIN_STEPS`
    such steps' worth of them are to be computed it grows with them, up to `most_mixed_prefill`. `min_lookahead`: tokens
    of output that each sequence must have room for when another one is let in. `min_saved`: how many keys must not be
    read again for a plan to say that several of its sequences have them in the same pages; 0 for never.
    """

    token_budget: int
    mixed_prefill: int
    max_running: int
    max_queued: int
    max_queued_tokens: int
    context_length: int
    vocab_size: int
    end_ids: tuple[int, ...] = ()
    min_lookahead: int = 64
    min_saved: int = 0
    most_mixed_prefill: int = 0  # never less than `mixed_prefill` counts

    def mixed(self, num_prompt: int) -> int:
        """The most prompt tokens beside a decoding sequence while `num_prompt` of them are to be computed."""
        return max(self.mixed_prefill, min(num_prompt // DRAIN_STEPS, self.most_mixed_prefill))


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
        """Its tokens are nobody's: to give them to others could put more prompt beside decodes than is allowed."""
        self.chosen.pop(sequence, None)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan on its way, with the sequence and the lease of each of its rows, and when it was made."""

    plan: StepPlan
    rows: list[tuple[Sequence, KVLease]]
    made: float


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
        assert limits.token_budget > 1 and limits.mixed_prefill > 0 and limits.max_running > 0, limits
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._order = choose_order(policy, self._num_known)
        self._random = random.Random(random_seed)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # sorted by waiting_rank
        self._queued = QueuedTokens(cache.page_size)
        self._running: list[Sequence] = []  # sorted by running_rank
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._flights: deque[_Flight] = deque()  # oldest first
        self._deltas: list[Delta] = []
        self._trails: list[Trail] = []
        self._num_added = 0
        self._step = 0
        self._answered = 0.0  # when the last step was
        self._lookahead = limits.min_lookahead
        self._speed = StepSpeed(full_step=limits.token_budget // 2)
        self._has_deadlines = False
        self._dropped: list[str] = []
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

    @property
    def is_blocked(self) -> bool:
        """Whether nothing can be done before something outside has been done for one of the sequences."""
        return not (self._running or self._deltas) and all(GRAMMAR_WAIT in s.waits for s in self._waiting)

    @property
    def is_answer_due(self) -> bool:
        """Whether a mask of the next step depends on what the newest step in flight draws."""
        return bool(self._flights and self._flights[-1].plan.masks)

    @property
    def num_in_flight(self) -> int:
        """Plans that are neither answered nor failed."""
        return len(self._flights)

    @property
    def oldest_step(self) -> int:
        """The number of the oldest plan in flight; there must be one."""
        return self._flights[0].plan.step

    def add(self, request: Request) -> None:
        """Take a request into the queue; raises the SgrayError that it must be refused with."""
        try:
            self._validate(request)
            sequence = self._sequence(request)
            self._estimate(sequence)
            if not request.num_generated:  # an answer that has begun elsewhere is not refused
                self._make_room(sequence)
        except SgrayError:
            self._totals["refused"] += 1
            raise
        self._totals["requests"] += 1
        self._sequences[request.id] = sequence
        sequence.mark("queued", 0, lambda: sequence.arrival)
        self._has_deadlines = self._has_deadlines or request.timeout_s is not None
        if not sequence.may_grow and sequence.prompt_logprobs is None:
            self._finish(sequence, Finish("length"))
            return
        if request.grammar is not None:
            sequence.waits.add(GRAMMAR_WAIT)
        self._enqueue(sequence)

    def has(self, request_id: str) -> bool:
        """Whether this request is unfinished."""
        return request_id in self._sequences

    def resume(self, request_id: str, start: Callable[[SequenceOf[int], frozenset[int]], Matcher]) -> None:
        """The grammar that a request waits for is ready: `start` makes a matcher from its `after` and its stop ids."""
        sequence = self._sequences[request_id]
        assert sequence.request.grammar is not None
        sequence.waits.discard(GRAMMAR_WAIT)
        sequence.begin_matching(start(sequence.request.grammar.after, sequence.stop_ids))
        if sequence.finish is not None:
            self._finish(sequence, sequence.finish)

    def refuse(self, request_id: str, error: SgrayError) -> None:
        """End a request that waits for what cannot be had."""
        self._fail(self._sequences[request_id], error)

    def take_dropped(self) -> list[str]:
        """Those that were ended in the queue since the last call, and whose grammars nobody waits for any more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; unknown and finished ones are none of our business."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._totals["aborted"] += 1
            self._finish(sequence, Finish("abort"))

    def end_programs(self, programs: SequenceOf[str]) -> None:
        """Nobody will come back to what these have computed; their requests, if there are any, go on."""
        for program in programs:
            self._cache.end_hold(program)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now. Each is to be answered, in order, or failed."""
        self._cache.end_silent_holds(self._clock() - PROGRAM_SILENCE_S)
        self._lookahead = max(self._limits.min_lookahead, self._lookahead - 1)
        if self._has_deadlines:
            self._end_late()
        step = _Step(self._limits.token_budget)
        self._continue_running(step)
        self._admit(step)
        return self._plan(step) if step.chosen else None

    def update(self, result: StepResult) -> None:
        """Take in what the oldest plan in flight computed."""
        flight = self._flights.popleft()
        plan = flight.plan
        assert plan.step == result.step, (plan.step, result.step)
        for index, (sequence, lease) in enumerate(flight.rows):
            if sequence.lease is not lease:
                continue  # it has ended or was retracted since
            if result.errors and (message := result.errors.get(index)):
                self._fail(sequence, EngineError(message))
            else:
                self._advance(sequence, lease, plan, result, index)
        self._measure(flight)

    def fail(self, error: SgrayError, step: int) -> None:
        """The plans from `step` on could not be executed: end their sequences, and trust nothing they computed."""
        failed = [flight for flight in self._flights if flight.plan.step >= step]
        for flight in failed:
            self._flights.remove(flight)
            for sequence, lease in flight.rows:
                if sequence.lease is lease:
                    self._fail(sequence, error)

    def fail_all(self, error: SgrayError) -> None:
        """End every sequence, running or waiting."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)
        self._flights.clear()

    def drain(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def drain_trails(self) -> list[Trail]:
        """The ways of traced requests that have ended since the last call."""
        trails, self._trails = self._trails, []
        return trails

    def load(self) -> Load:
        """What there is to do, how full the memory is, and the totals so far."""
        cache = self._cache
        prefilling = resident = 0
        for sequence in self._running:
            resident += sequence.num_computed
            if (remaining := sequence.num_remaining) > 1:
                prefilling += remaining
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=prefilling + sum(s.num_uncached for s in self._waiting),
            resident_tokens=resident,
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
        self._queued.check(self._waiting)
        for sequence in self._running:
            self._check_flights(sequence)

    def _check_flights(self, sequence: Sequence) -> None:
        """What is pending is drawn by a step in flight, and what is shared is neither pending nor being computed."""
        num_drawn = num_computing = 0
        for flight in self._flights:
            for index, (_, lease) in enumerate(flight.rows):
                if lease is sequence.lease:
                    num_drawn += flight.plan.samples[index]
                    num_computing += flight.plan.lengths[index]
        assert sequence.num_pending == num_drawn, (sequence.num_pending, num_drawn)
        assert sequence.lease is not None
        num_done, num_shared = sequence.num_computed - num_computing, sequence.lease.num_committed
        assert num_done <= len(sequence.tokens), "a token is computed that nobody knows"
        assert num_shared * self._cache.page_size <= num_done, "a page is shared before it is computed"

    def _validate(self, request: Request) -> None:
        limits, sampling, num_prompt = self._limits, request.sampling, request.num_prompt
        if request.id in self._sequences:
            raise InvalidRequestError(f"a request with the id {request.id!r} is in work already; use a new id")
        if num_prompt <= 0:
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

    def _validate_ids(self, request: Request) -> None:
        """What indexes the vocabulary must lie in it, within limits: else the whole batch would go down."""
        self._validate_counts(request)
        sampling, vocab_size = request.sampling, self._limits.vocab_size
        for name, ids in (
            ("prompt", request.tokens),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logprob_ids", sampling.logprob_ids),
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

    def _validate_counts(self, request: Request) -> None:
        sampling, num_ends = request.sampling, len(self._limits.end_ids)
        for name, count, most in (
            ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES),
            ("stop_token_ids", len(set(sampling.stop_token_ids)), MAX_END_IDS - num_ends),
            ("logprob_ids", len(sampling.logprob_ids), MAX_LOGPROB_IDS),
        ):
            if count > most:
                raise InvalidRequestError(f"{name} has {count} entries; at most {most} are supported", param=name)

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
            max_length=request.num_prompt + sampling.max_new_tokens,
            stop_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._limits.end_ids),
            deadline=math.inf if request.timeout_s is None else self._clock() + request.timeout_s,
        )

    def _make_room(self, sequence: Sequence) -> None:
        """Find a new sequence its place in the queue, if need be that of others; raises QueueFullError."""
        limits = self._limits
        num_over = len(self._waiting) - len(self._free_slots) - limits.max_queued + 1
        num_tokens = self._queued.total + self._queued.added_by(sequence)
        num_tokens_over = num_tokens - limits.max_queued_tokens if self._waiting else 0
        if num_over <= 0 and num_tokens_over <= 0:
            return
        seconds = retry_after(self._queued.total, self._speed.prefill_tokens_per_s)
        victims = give_way(self._waiting, sequence.request.priority, num_over, num_tokens_over, self._queued.freed_by)
        if victims is None:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting, with this one {num_tokens} tokens are to be computed, and "
                f"the queue holds {limits.max_queued} requests and {limits.max_queued_tokens} tokens; try again later",
                retry_after_s=seconds,
            )
        for victim in victims:
            message = "the queue is full, and a request of a higher priority took this one's place; try again later"
            self._drop(victim, QueueFullError(message, retry_after_s=seconds))

    def _end_late(self) -> None:
        """End those that wait and whose answer would come after their deadline, as far as that is certain."""
        now, speed = self._clock(), self._speed.best_prefill_tokens_per_s
        for sequence in [one for one in self._waiting if is_late(one, now, speed)]:
            num_uncached = len(sequence.tokens) - self._num_known(sequence)  # others may have computed some
            sequence.num_uncached = min(sequence.num_uncached, num_uncached)
            if is_late(sequence, now, speed):
                message = (
                    f"the answer would have come after the {sequence.request.timeout_s:g} s that a request may take "
                    "(api.request_timeout_s), and was not begun; try again later, or send a shorter prompt"
                )
                self._drop(sequence, RequestTimeoutError(message))

    def _drop(self, sequence: Sequence, error: SgrayError) -> None:
        if GRAMMAR_WAIT in sequence.waits:
            self._dropped.append(sequence.request.id)
        self._fail(sequence, error)

    def _estimate(self, sequence: Sequence) -> None:
        """Find out how much it will have to compute."""
        sequence.num_uncached = len(sequence.tokens) - self._num_known(sequence)
        self._await_prefix(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=waiting_rank)
        self._queued.add(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._queued.remove(sequence)

    def _num_known(self, sequence: Sequence) -> int:
        return self._cache.num_known(sequence.hashes, sequence.max_cached)

    # ---- one step: what goes on

    def _continue_running(self, step: _Step) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            remaining = sequence.num_remaining
            if remaining == 0 or sequence.waits or sequence.is_drawn_out:
                continue  # it waits, if only for an answer that is in flight
            (decoding if remaining == 1 else prefilling).append(sequence)
        has_prefill = bool(prefilling or (self._waiting and self._free_slots))
        most = step.budget - max(1, step.budget // 4) if has_prefill else step.budget
        if len(decoding) > most:
            decoding = sorted(sorted(decoding, key=lambda s: s.last_step)[:most], key=running_rank)
        self._give(step, decoding)
        if step.chosen:
            num_prompt = sum(sequence.num_remaining for sequence in prefilling) + self._queued.total
            step.budget = min(step.budget, self._limits.mixed(num_prompt))
        self._give(step, prefilling)

    def _give(self, step: _Step, sequences: list[Sequence]) -> None:
        """Let the sequences compute what they have left, in order, as far as budget and memory go."""
        size = self._cache.page_size
        for sequence in sequences:
            lease = sequence.lease
            if lease is None:
                continue  # retracted for the sake of an earlier one
            count = min(sequence.num_remaining, step.budget)
            if count == 0:
                return
            if sequence.num_computed + count <= len(lease.pages) * size or self._secure(sequence, lease, count, step):
                step.give(sequence, count)

    def _secure(self, sequence: Sequence, lease: KVLease, count: int, step: _Step) -> bool:
        """Pages for `count` more tokens, if need be by retracting the youngest, which may be the sequence itself."""
        while not self._cache.grow(lease, sequence.num_computed + count):
            victim = self._running[-1]
            if len(self._running) == 1:
                if self._flights:
                    return False  # what they answer may end it, or show its pages to be in the tree already
                if not lease.duplicates:  # it has used up the whole memory; with duplicates it need only start again
                    self._finish(sequence, Finish("length"))  # from the tree's pages
                    return False
            step.withdraw(victim)
            self._retract(victim)
            if victim is sequence:
                return False
        return True

    def _retract(self, sequence: Sequence) -> None:
        """Back to the queue. Its whole pages were committed as they were answered: they stay until they are evicted.

        Tokens that are pending for it are drawn again, and are the same.
        """
        self._totals["retracted"] += 1
        self._lookahead = min(2 * self._lookahead + 1, MAX_LOOKAHEAD)
        sequence.mark("retracted", sequence.last_step, self._clock)
        self._leave(sequence)
        sequence.is_retracted = True
        sequence.num_computed = sequence.num_pending = 0
        self._estimate(sequence)
        self._enqueue(sequence)

    # ---- one step: who comes in

    def _admit(self, step: _Step) -> None:
        """Let sequences in, in order, until slots, budget or memory end; a small one does not overtake a large one."""
        if not self._waiting or not self._free_slots or not step.budget:
            return
        reserved = sum(self._num_reserved(s, s.lease) for s in self._running)
        for sequence in list(self._order(self._waiting, self._clock())):
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
        likely = min(len(sequence.tokens) + sequence.num_pending + self._lookahead, sequence.max_length)
        return max(0, self._cache.pages_for(likely) - len(lease.pages))

    def _finish_if_impossible(self, sequence: Sequence) -> bool:
        """End a retracted sequence that has outgrown the whole memory."""
        if self._cache.pages_for(len(sequence.tokens)) <= self._cache.num_pages:
            return False
        self._finish(sequence, Finish("length"))
        return True

    def _place(self, sequence: Sequence, lease: KVLease) -> None:
        self._dequeue(sequence)
        insort(self._running, sequence, key=running_rank)
        sequence.slot = self._free_slots.pop()
        sequence.lease = lease
        sequence.num_computed = lease.num_cached
        sequence.num_sent_pages = 0
        if sequence.num_cached is None:
            sequence.num_cached = lease.num_cached
            self._totals["prompt_tokens"] += len(sequence.request.tokens)
            self._totals["cached_tokens"] += lease.num_cached

    def _plan(self, step: _Step) -> StepPlan:
        self._step += 1
        plan = StepPlan(self._step, admissions=[self._admission(s) for s in step.admissions])
        rows: list[tuple[Sequence, KVLease]] = []
        for sequence, count in step.chosen.items():
            lease, start, tokens = sequence.lease, sequence.num_computed, sequence.tokens
            assert lease is not None
            end = start + count
            may_sample = end == len(tokens) + sequence.num_pending and sequence.may_grow
            rows.append((sequence, lease))
            plan.slots.append(sequence.slot)
            plan.starts.append(start)
            plan.lengths.append(count)
            if may_sample and sequence.matcher is not None:
                plan.masks[len(plan.samples)] = sequence.mask
            plan.samples.append(may_sample)
            if count > 1:
                plan.tokens.extend(tokens[start:end])
            else:
                plan.tokens.append(tokens[start] if start < len(tokens) else ON_DEVICE)
            if sequence.num_sent_pages < len(lease.pages):
                self._send_pages(sequence, lease, plan)
            sequence.num_computed = end
            sequence.num_pending += may_sample
            sequence.last_step = self._step
        for sequence in step.admissions:
            sequence.mark("scheduled", self._step, self._clock)
        if (min_saved := self._limits.min_saved) and len(rows) > 1:
            plan.shared.extend(shared_spans([lease for _, lease in rows], self._cache.page_size, min_saved))
        self._flights.append(_Flight(plan, rows, self._clock()))
        return plan

    def _send_pages(self, sequence: Sequence, lease: KVLease, plan: StepPlan) -> None:
        """Tell the executor which pages the row has got since the last time."""
        if lease.copy is not None and (copy := self._cache.take_copy(lease)):
            plan.copies.append(copy)
        first = sequence.num_sent_pages
        plan.new_pages.extend((sequence.slot, place, lease.pages[place]) for place in range(first, len(lease.pages)))
        sequence.num_sent_pages = len(lease.pages)

    def _admission(self, sequence: Sequence) -> Admission:
        return Admission(
            sequence.slot,
            sequence.request.sampling,
            sequence.seed,
            sequence.num_prompt,
            list(sequence.tokens),
            # A mask holds ends back by itself, where that leaves anything to draw.
            () if sequence.matcher is not None else tuple(sorted(sequence.stop_ids)),
            is_masked=sequence.matcher is not None,
        )

    # ---- after a step

    def _advance(self, sequence: Sequence, lease: KVLease, plan: StepPlan, result: StepResult, index: int) -> None:
        start = plan.starts[index]
        end = start + plan.lengths[index]  # all tokens up to here are known, and now computed
        if sequence.prompt_logprobs is not None:
            sequence.collect_prompt_logprobs(start, result.prompt_logprobs[index])
        if end // self._cache.page_size > lease.num_committed:
            self._cache.commit(lease, sequence.tokens, end)
        if plan.samples[index]:
            if not sequence.has_emitted:
                sequence.mark("first_token", plan.step, self._clock)
            sequence.accept(result.tokens[index])
            tokens = sequence.take_unsent()
            self._totals["generation_tokens"] += len(tokens)
            logprobs = result.logprobs[index]
            self._deltas.append(sequence.delta(tokens, [] if logprobs is None else [logprobs]))
            if sequence.finish is not None:
                self._remove(sequence, plan.step)
        elif end == sequence.max_length:
            self._finish(sequence, Finish("length"))  # nothing was to be drawn

    def _measure(self, flight: _Flight) -> None:
        """A step begins when it is planned and the one before it is answered, whichever comes later."""
        now, lengths = self._clock(), flight.plan.lengths
        num_decode = lengths.count(1)
        self._speed.record(now - max(flight.made, self._answered), sum(lengths) - num_decode, num_decode)
        self._answered = now

    def _fail(self, sequence: Sequence, error: SgrayError) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease, is_poisoned=True)
        self._finish(sequence, failure(error))

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence without drawing a token."""
        sequence.finish = finish
        tokens = sequence.take_unsent()
        self._totals["generation_tokens"] += len(tokens)
        self._deltas.append(sequence.delta(tokens, []))
        self._remove(sequence, max(0, sequence.last_step))

    def _remove(self, sequence: Sequence, step: int) -> None:
        if sequence.request.trace_headers:
            sequence.mark("finished", step, self._clock)
            self._trails.append(sequence.trail())
        del self._sequences[sequence.request.id]
        if sequence.slot != NO_SLOT:
            self._leave(sequence)
        elif sequence in self._waiting:
            self._dequeue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and pages back. What a program has computed is held for it, unless it has lost interest."""
        assert sequence.lease is not None
        program, finish = sequence.request.program, sequence.finish
        if program and (finish is None or finish.reason in ("stop", "length")):
            self._cache.hold(sequence.lease, program, self._clock())
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._cache.release(sequence.lease)
        sequence.slot, sequence.lease = NO_SLOT, None
