"""Plan to tokens on one rank. Holds the model, the pool and what each slot was told; decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from sgray.engine.batch import Batch, build_batch
from sgray.engine.plan import ON_DEVICE, Admission, StepPlan, StepResult
from sgray.engine.sampler import Counts, RowSampling, Sampled, has_penalty, rows_at_once, sample, token_logprobs
from sgray.layers.attention import AttentionBackend, StepContext
from sgray.layers.residual import Residual
from sgray.memory.pool import KVPool
from sgray.models.decoder import Decoder
from sgray.protocol import NO_LOGPROBS, TokenLogprobs


@dataclass(slots=True)
class Slot:
    """A sequence as its admission told it, the pages it was given since, and how many of its tokens are counted.

    `drawn` is the last token that was drawn for it; 0 where none could be, and then nobody looks at what follows.
    """

    admission: Admission
    counts: Counts | None
    num_counted: int
    pages: list[int] = field(default_factory=list)
    drawn: int = 0


class ModelRunner:
    """Executes plans for one model on one device, each as it is submitted; `collect` hands out results in order.

    A `depth` of 1 has them planned for as on a device that computes by itself.
    """

    def __init__(self, model: Decoder, pool: KVPool, backend: AttentionBackend, *, depth: int = 0) -> None:
        self.depth = depth
        self._model = model
        self._pool = pool
        self._backend = backend
        self._slots: dict[int, Slot] = {}
        self._results: deque[StepResult] = deque()

    @property
    def reads_shared(self) -> bool:
        """Every sequence reads its own pages."""
        return False

    def submit(self, plan: StepPlan) -> None:
        """Computes one step and keeps the result."""
        self._results.append(self._execute(plan))

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected."""
        return self._results.popleft()

    def reset(self) -> None:
        """Forgets results that were not collected."""
        self._results.clear()

    def fault(self) -> str | None:
        """None: what can be lost here is lost in a step."""
        return None

    def close(self) -> None:
        """Nothing runs elsewhere."""

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        """Fills the pool's pages and draws the tokens."""
        tokens = self._prepare(plan)
        if not plan.slots:
            return StepResult(plan.step, [], [], [])
        batch = build_batch(plan, tokens, [self._slots[slot].pages for slot in plan.slots], self._pool)
        sampling = [span.row + span.length - 1 for span, draws in zip(batch.spans, plan.samples, strict=True) if draws]
        rows = torch.tensor(sampling, dtype=torch.int64, device=batch.tokens.device)
        if len(sampling) == len(batch.tokens):
            hidden = drawn = self._model.run(batch.tokens, self._context(batch))
        elif self._scores_prompts(plan):
            hidden = self._model.run(batch.tokens, self._context(batch))
            drawn = hidden.take(rows)
        else:
            hidden = drawn = self._model.run(batch.tokens, self._context(batch), rows)
        prompt_logprobs = [self._prompt_logprobs(plan, index, batch, hidden) for index in range(len(plan.slots))]
        return self._answer(plan, self._sample(plan, batch, drawn), prompt_logprobs)

    def _scores_prompts(self, plan: StepPlan) -> bool:
        """Whether a sequence asks for more than its last row."""
        return any(self._slots[slot].admission.sampling.prompt_logprobs != NO_LOGPROBS for slot in plan.slots)

    def _prepare(self, plan: StepPlan) -> list[int]:
        """Admissions, copies, new pages, the tokens that the sequences have grown by; the step's tokens, all known."""
        for admission in plan.admissions:
            self._slots[admission.slot] = self._admit(admission)
        self._pool.copy_pages(plan.copies)
        for slot, place, page in plan.new_pages:
            self._slots[slot].pages[place:] = [page]
        tokens: list[int] = []
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            state = self._slots[slot]
            self._clear_last_page(state, start, start + length)
            own = plan.tokens[len(tokens) : len(tokens) + length]
            if own[-1] == ON_DEVICE:
                own[-1] = state.drawn
            _count(state, start, own)
            tokens += own
        return tokens

    def _admit(self, admission: Admission) -> Slot:
        counts = None
        if has_penalty(admission.sampling):
            size, device = self._model.spec.vocab_size, self._pool.pages.device
            counts = Counts.of(admission.tokens, admission.num_prompt, size, device)
        return Slot(admission, counts, len(admission.tokens))

    def _clear_last_page(self, state: Slot, start: int, end: int) -> None:
        size = self._pool.shape.page_size
        # Only a last page that this step begins and does not fill can show an earlier owner's tokens to a mask.
        if end % size and end - end % size >= start:
            self._pool.clear_pages([state.pages[end // size]])

    def _context(self, batch: Batch) -> StepContext:
        return StepContext(
            rotation=self._model.rope.rotation(batch.positions),
            rows=self._pool.rows,
            key_rows=batch.key_rows,
            value_rows=batch.value_rows,
            attention=self._backend.plan(self._pool.layers, batch.spans),
        )

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Residual) -> Sampled:
        """Tokens of the sequences that sample, in batch order, from their rows of hidden states."""
        sampling = [index for index, samples in enumerate(plan.samples) if samples]
        if not sampling:
            return Sampled([], [])
        spans = [batch.spans[index] for index in sampling]
        rows = [
            self._row(plan.slots[index], span.start + span.length, plan.masks.get(index))
            for index, span in zip(sampling, spans, strict=True)
        ]
        return sample(self._model.logits(hidden), rows)

    def _row(self, slot: int, position: int, mask: bytes | None) -> RowSampling:
        """How the token at `position` of a slot's sequence is drawn."""
        state = self._slots[slot]
        told = state.admission
        return RowSampling(told.sampling, told.seed, position - told.num_prompt, told.end_ids, state.counts, mask)

    def _prompt_logprobs(
        self, plan: StepPlan, index: int, batch: Batch, hidden: Residual
    ) -> list[TokenLogprobs] | None:
        """One entry for each prompt token that the span's positions predict; logits in pieces of bounded size."""
        told = self._slots[plan.slots[index]].admission
        num_top, ids = told.sampling.prompt_logprobs, told.sampling.logprob_ids
        if num_top == NO_LOGPROBS:
            return None
        span = batch.spans[index]
        targets = told.tokens[span.start + 1 : min(span.start + span.length + 1, told.num_prompt)]
        at_once = rows_at_once(self._model.spec.vocab_size)
        entries: list[TokenLogprobs] = []
        for first in range(0, len(targets), at_once):
            piece = targets[first : first + at_once]
            rows = hidden.take(slice(span.row + first, span.row + first + len(piece)))
            entries += token_logprobs(self._model.logits(rows), piece, [num_top] * len(piece), [ids] * len(piece))
        return entries

    def _answer(
        self, plan: StepPlan, sampled: Sampled, prompt_logprobs: list[list[TokenLogprobs] | None]
    ) -> StepResult:
        """Spreads the sampled rows over the whole batch, and keeps what was drawn."""
        result = StepResult(plan.step, [-1] * len(plan.slots), [None] * len(plan.slots), prompt_logprobs)
        sampling = [index for index, samples in enumerate(plan.samples) if samples]
        for row, index in enumerate(sampling):
            result.tokens[index] = sampled.tokens[row]
            result.logprobs[index] = sampled.logprobs[row]
            self._slots[plan.slots[index]].drawn = max(0, sampled.tokens[row])
            if row in sampled.errors:
                result.errors[index] = sampled.errors[row]
        return result


def _count(state: Slot, start: int, tokens: list[int]) -> None:
    """Counts generated tokens that the runner sees for the first time, for penalties."""
    new = tokens[max(0, state.num_counted - start) :]
    state.num_counted += len(new)
    if state.counts is not None:
        for token in new:
            state.counts.add(token)
