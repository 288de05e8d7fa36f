"""Plans to tokens on a GPU: the executor that never waits for the device before it has to.

`submit` queues a step, as one CUDA graph where its size has one; `collect` waits for the oldest. What was drawn stays
on the device for the next step, and comes to the host in pinned memory behind an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgray.engine.device_state import NUM_BUFFERS, DeviceState
from sgray.engine.graphs import StepGraphs, graph_sizes
from sgray.engine.plan import StepPlan, StepResult
from sgray.engine.sampler import rows_at_once
from sgray.errors import DeviceLostError
from sgray.kernels.launch import features
from sgray.kernels.sampling.kernel import sample
from sgray.kernels.sampling.reference import id_logprobs, token_logprobs
from sgray.kernels.span_attention.sharing import SharedUnits, share
from sgray.kernels.step_inputs.kernel import expand_step, record_tokens
from sgray.layers.backends.kernel_attention import AttentionSizes, KernelAttention, StepSize
from sgray.layers.residual import Residual
from sgray.memory.pool import KVPool
from sgray.models.decoder import Decoder
from sgray.protocol import NO_LOGPROBS, TokenLogprobs

NOT_FINITE = "the model's scores are not finite numbers"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step: `max_graph` is the largest decode batch run as a graph, 0 for none."""

    max_sequences: int
    max_tokens: int
    max_length: int
    max_graph: int


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Log-probabilities on their way to the host: of R chosen tokens, of the best ids of each row (R, n), and of the
    ids that each row asked for, `num_ids` of them (R, most that any row asked for); None where none did."""

    chosen_R: Tensor
    ids_RN: Tensor
    values_RN: Tensor
    num_ids: Sequence[int]
    of_ids_RM: Tensor | None

    def entries(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry a row, with as many alternatives as each row wants. Only when the step has ended."""
        of_ids = [[]] * len(num_top) if self.of_ids_RM is None else self.of_ids_RM.tolist()
        best = zip(self.ids_RN.tolist(), self.values_RN.tolist(), num_top, strict=True)
        pairs = [list(zip(ids[:count], values[:count], strict=True)) for ids, values, count in best]
        rows = zip(self.chosen_R.tolist(), pairs, of_ids, self.num_ids, strict=True)
        return [TokenLogprobs(chosen, top, own[:count]) for chosen, top, own, count in rows]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was queued. `prompt_logprobs` has an entry for each sequence that wants them, in pieces."""

    plan: StepPlan
    done: torch.cuda.Event | None
    tokens_B: Tensor
    asking: list[int]
    num_top: list[int]
    logprobs: Alternatives | None
    prompt_logprobs: dict[int, list[tuple[Alternatives, list[int]]]]


@dataclass(frozen=True, slots=True)
class Told:
    """What a slot's admission says about log-probabilities."""

    logprobs: int
    prompt_logprobs: int
    prompt: list[int]
    ids: tuple[int, ...]


class DeviceRunner:
    """Executes plans for one model on one device, each in the order of submission, on one stream."""

    def __init__(self, model: Decoder, pool: KVPool, capacity: Capacity, sizes: AttentionSizes) -> None:
        self._model = model
        self._pool = pool
        self._device = pool.pages.device
        max_pages = -(-capacity.max_length // pool.shape.page_size)
        self._state = DeviceState(
            capacity.max_sequences, capacity.max_tokens, max_pages, model.spec.vocab_size, self._device
        )
        rotation = model.rope.table(capacity.max_length)
        windows = model.spec.windows
        self._attention = KernelAttention(pool.layers, self._state.page_table_SP, rotation, windows, sizes)
        self._has_pdl = features(self._device).has_pdl
        self._max_length = capacity.max_length
        is_pinned = self._device.type == "cuda"
        self._results = [
            torch.zeros(capacity.max_sequences, dtype=torch.int32, pin_memory=is_pinned) for _ in range(NUM_BUFFERS)
        ]
        self._told: dict[int, Told] = {}
        self._flights: deque[Flight] = deque()
        captured = (
            graph_sizes(
                capacity.max_graph, capacity.max_tokens, self._attention.max_short, has_shared=self.reads_shared
            )
            if capacity.max_graph
            else []
        )
        self._graphs = StepGraphs(self._launch, captured)

    @property
    def depth(self) -> int:
        """One step may be in flight while the next is planned."""
        return 1

    @torch.inference_mode()
    def try_largest(self) -> None:
        """Launches the largest step, without a sequence in it: all its memory is taken, all its kernels are there."""
        count, num_tokens = self._state.layout.max_sequences, self._state.layout.max_tokens
        for max_short in {1, self._attention.max_short}:
            num_short = min(num_tokens, count * max_short)
            for longest in (0, self._max_length):
                size = StepSize(count, num_tokens, max_short, num_short, num_tokens, longest)
                self._launch_exactly(size)
                self._launch_exactly(size, keeps_all=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the graphs; before the first step, or between steps."""
        self._graphs.capture_all()

    @property
    def reads_shared(self) -> bool:
        """Keys that sequences have in the same pages are read once, where that pays and a layer sees all keys."""
        return None in self._model.spec.windows

    def submit(self, plan: StepPlan) -> None:
        """Queues one step; nothing here waits for the device. DeviceLostError if that has failed for good."""
        try:
            self._submit(plan)
        except torch.AcceleratorError as error:
            raise DeviceLostError(str(error)) from error

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight. DeviceLostError if the device has failed for good."""
        flight = self._flights.popleft()
        if flight.done is not None:
            try:
                flight.done.synchronize()
            except torch.AcceleratorError as error:
                raise DeviceLostError(str(error)) from error
        return _result(flight)

    def reset(self) -> None:
        """Drops what is in flight."""
        self._flights.clear()

    def fault(self) -> str | None:
        """None: what can be lost here is lost in a step."""
        return None

    def close(self) -> None:
        """Nothing runs elsewhere."""

    @torch.inference_mode()
    def _submit(self, plan: StepPlan) -> None:
        for told in plan.admissions:
            params = told.sampling
            prompt = told.tokens[: told.num_prompt] if params.prompt_logprobs != NO_LOGPROBS else []
            self._told[told.slot] = Told(params.logprobs, params.prompt_logprobs, prompt, params.logprob_ids)
        self._state.admit(plan)
        self._pool.copy_pages(plan.copies)
        shared = self._share(plan)
        self._state.upload(plan, shared)
        hidden = self._run(plan, is_shared=bool(shared.units))
        self._flights.append(self._send_back(plan, hidden))

    def _share(self, plan: StepPlan) -> SharedUnits:
        """What is read once for several sequences of a step: nothing where that would not pay for a decode."""
        if not plan.shared:
            return SharedUnits()
        shared = share(
            plan.shared,
            plan.slots,
            plan.lengths,
            tokens_per_task=self._attention.max_short,
            max_units=self._state.layout.max_sequences,
            max_read=self._attention.max_shared,
        )
        is_decode = len(plan.tokens) == len(plan.slots)
        return shared if not is_decode or shared.pays(plan.starts) else SharedUnits()

    def _run(self, plan: StepPlan, *, is_shared: bool) -> Residual | None:
        """The step by its graph, or by single kernels where there is none; all hidden states if prompts are scored."""
        count, num_tokens = len(plan.slots), len(plan.tokens)
        if any(self._told[slot].prompt_logprobs != NO_LOGPROBS for slot in plan.slots):
            return self._launch_exactly(self._exact_size(plan, is_shared=is_shared), keeps_all=True)
        size = self._graphs.fitting(count, num_tokens, is_decode=num_tokens == count, is_shared=is_shared)
        if size is not None:
            self._graphs.replay(size)
        else:
            self._launch_exactly(self._exact_size(plan, is_shared=is_shared))
        return None

    def _exact_size(self, plan: StepPlan, *, is_shared: bool) -> StepSize:
        max_short = 1 if len(plan.tokens) == len(plan.slots) else self._attention.max_short
        num_short = sum(length for length in plan.lengths if length <= max_short)
        longest = max(start + length for start, length in zip(plan.starts, plan.lengths, strict=True))
        num_tokens = len(plan.tokens)
        num_long = num_tokens - num_short
        return StepSize(len(plan.slots), num_tokens, max_short, num_short, num_long, longest, is_shared)

    def _launch_exactly(self, size: StepSize, *, keeps_all: bool = False) -> Residual:
        """A step of any size; planned as for the most sequences, so that no size needs kernels of its own."""
        return self._launch(size, self._state.layout.max_sequences, keeps_all=keeps_all)

    def _launch(self, size: StepSize, max_planned: int | None = None, *, keeps_all: bool = False) -> Residual:
        """Queues every kernel of a step whose words lie on the device; the hidden states of its last rows, or all."""
        state, pdl = self._state, self._has_pdl
        rows = state.rows.first(size.num_tokens, size.num_sequences)
        batch = state.layout.tables(state.words, max_planned or size.num_sequences)
        expand_step(
            state.words,
            state.layout,
            state.page_table_SP,
            state.last_tokens_S,
            rows,
            page_size=self._pool.shape.page_size,
            pdl=pdl,
        )
        asked_R = None if size.is_decode or keeps_all else rows.last_rows_B
        hidden = self._model.run(rows.tokens_T, self._attention.plan(rows, batch, size), asked_R)
        last = hidden.take(rows.last_rows_B) if keeps_all and not size.is_decode else hidden
        logits_BV = self._model.logits(last, state.logits_BV[: size.num_sequences])
        drawn_B = state.drawn_B[: size.num_sequences]
        masks_BW = state.masks_BW[: size.num_sequences]
        draws = (rows.draw_slots_B, rows.draw_positions_B)
        sample(logits_BV, *draws, state.sampling, drawn_B, bitmask_RW=masks_BW, pdl=pdl)
        record_tokens(drawn_B, rows.draw_slots_B, state.last_tokens_S, pdl=pdl)
        return hidden

    def _send_back(self, plan: StepPlan, hidden: Residual | None) -> Flight:
        """Queues the copies of what the host wants to know, and the event behind them."""
        count = len(plan.slots)
        tokens_B = self._results[plan.step % NUM_BUFFERS][:count]
        tokens_B.copy_(self._state.drawn_B[:count], non_blocking=True)
        asking = [
            index
            for index, (slot, draws) in enumerate(zip(plan.slots, plan.samples, strict=True))
            if draws and self._told[slot].logprobs != NO_LOGPROBS
        ]
        num_top = [self._told[plan.slots[index]].logprobs for index in asking]
        ids = [self._told[plan.slots[index]].ids for index in asking]
        logprobs = self._chosen_logprobs(asking, max(num_top), ids) if asking else None
        prompts = {} if hidden is None else self._prompt_logprobs(plan, hidden)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Flight(plan, done, tokens_B, asking, num_top, logprobs, prompts)

    def _chosen_logprobs(self, asking: list[int], num_top: int, ids: list[tuple[int, ...]]) -> Alternatives:
        rows = self._on_device(asking)
        tokens = self._state.drawn_B.index_select(0, rows)
        return self._alternatives(self._state.logits_BV.index_select(0, rows), tokens, num_top, ids)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Residual) -> dict[int, list[tuple[Alternatives, list[int]]]]:
        """For every prompt token that a row of the step predicts; logits in pieces of bounded size."""
        found: dict[int, list[tuple[Alternatives, list[int]]]] = {}
        first, at_once = 0, rows_at_once(self._model.spec.vocab_size)
        for index, (slot, start, length) in enumerate(zip(plan.slots, plan.starts, plan.lengths, strict=True)):
            told = self._told[slot]
            if told.prompt_logprobs != NO_LOGPROBS:
                targets = told.prompt[start + 1 : start + length + 1]
                found[index] = []
                for begin in range(0, len(targets), at_once):
                    piece = targets[begin : begin + at_once]
                    rows = hidden.take(slice(first + begin, first + begin + len(piece)))
                    logits_RV = self._model.logits(rows)
                    alternatives = self._alternatives(
                        logits_RV, self._on_device(piece), told.prompt_logprobs, [told.ids] * len(piece)
                    )
                    found[index].append((alternatives, [told.prompt_logprobs] * len(piece)))
            first += length
        return found

    def _alternatives(
        self, logits_RV: Tensor, tokens_R: Tensor, num_top: int, ids: Sequence[tuple[int, ...]]
    ) -> Alternatives:
        num_ids, of_ids_RM = [len(own) for own in ids], None
        if any(num_ids):
            padded = [token for own in ids for token in (*own, *[0] * (max(num_ids) - len(own)))]
            of_ids_RM = self._to_host(id_logprobs(logits_RV, self._on_device(padded).view(len(ids), -1)))
        chosen_R, ids_RN, values_RN = map(self._to_host, token_logprobs(logits_RV, tokens_R, num_top))
        return Alternatives(chosen_R, ids_RN, values_RN, num_ids, of_ids_RM)

    def _to_host(self, values: Tensor) -> Tensor:
        is_pinned = self._device.type == "cuda"
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_pinned)
        return host.copy_(values, non_blocking=True)

    def _on_device(self, values: list[int]) -> Tensor:
        host = torch.tensor(values, dtype=torch.int32)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host


def _result(flight: Flight) -> StepResult:
    plan = flight.plan
    drawn = flight.tokens_B.tolist()
    tokens = [token if draws else -1 for token, draws in zip(drawn, plan.samples, strict=True)]
    errors = {index: NOT_FINITE for index, draws in enumerate(plan.samples) if draws and drawn[index] < 0}
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    if flight.logprobs is not None:
        for index, entry in zip(flight.asking, flight.logprobs.entries(flight.num_top), strict=True):
            logprobs[index] = None if index in errors else entry
    prompts: list[list[TokenLogprobs] | None] = [None] * len(tokens)
    for index, pieces in flight.prompt_logprobs.items():
        prompts[index] = [entry for piece, num_top in pieces for entry in piece.entries(num_top)]
    return StepResult(plan.step, tokens, logprobs, prompts, errors)
