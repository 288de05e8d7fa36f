"""What stays on the device from step to step, by slot, and the one upload a step that changes it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgray.engine.plan import StepPlan
from sgray.kernels.sampling.state import SamplingState, describe, store
from sgray.kernels.span_attention.sharing import SharedUnits
from sgray.kernels.step_inputs.words import NUM_PAGES, NUM_SEQUENCES, NUM_TOKENS, NUM_UNITS, StepRows, StepWords

# A step may be in flight and the next one planned; the one after that finds the first buffer free again.
NUM_BUFFERS = 3


class DeviceState:
    """Tables of `num_slots` slots, and the buffers of steps of at most `max_tokens` tokens."""

    def __init__(self, num_slots: int, max_tokens: int, max_pages: int, vocab_size: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.layout = StepWords(num_slots, max_tokens)
        num_words = self.layout.pages + 3 * num_slots * max_pages
        self.words = zeros(num_words)
        self.page_table_SP = zeros(num_slots, max_pages)
        self.last_tokens_S = zeros(num_slots)
        self.sampling = SamplingState.allocate(num_slots, vocab_size, device)
        self.rows = StepRows.allocate(max_tokens, num_slots, device)
        self.drawn_B = zeros(num_slots)
        self.logits_BV = torch.empty(num_slots, vocab_size, device=device)
        self.masks_BW = zeros(num_slots, -(-vocab_size // 32))
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_BUFFERS)]
        self._staged_masks = [
            torch.zeros(self.masks_BW.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_BUFFERS)
        ]

    def admit(self, plan: StepPlan) -> None:
        """Slots learn how their new sequences are sampled."""
        descriptions = [
            describe(
                told.sampling,
                seed=told.seed,
                num_prompt=told.num_prompt,
                end_ids=told.end_ids,
                tokens=told.tokens,
                is_masked=told.is_masked,
            )
            for told in plan.admissions
        ]
        store(self.sampling, descriptions, [told.slot for told in plan.admissions])

    def upload(self, plan: StepPlan, shared: SharedUnits) -> None:
        """Queues the copy of a plan's words."""
        staged = self._staged[plan.step % NUM_BUFFERS]
        used = self._fill(staged.numpy(), plan, shared)
        self.words[:used].copy_(staged[:used], non_blocking=True)
        if plan.masks:
            self._upload_masks(plan)

    def _upload_masks(self, plan: StepPlan) -> None:
        """Queues the copy of a plan's masks; other rows get what nobody reads."""
        staged = self._staged_masks[plan.step % NUM_BUFFERS]
        rows_BW = staged.numpy()
        for index, mask in plan.masks.items():
            rows_BW[index] = np.frombuffer(mask, dtype=np.int32)
        first, end = min(plan.masks), max(plan.masks) + 1
        self.masks_BW[first:end].copy_(staged[first:end], non_blocking=True)

    def _fill(self, words: np.ndarray, plan: StepPlan, shared: SharedUnits) -> int:
        """Writes the words; how many."""
        layout, count, num_tokens, num_pages = self.layout, len(plan.slots), len(plan.tokens), len(plan.new_pages)
        words[NUM_SEQUENCES], words[NUM_TOKENS], words[NUM_PAGES] = count, num_tokens, num_pages
        lengths = np.array(plan.lengths, dtype=np.int32)
        columns = (
            ("slots", plan.slots),
            ("starts", plan.starts),
            ("lengths", lengths),
            ("firsts", np.cumsum(lengths) - lengths),
            ("draws", plan.samples),
        )
        for kind, values in columns:
            words[layout.place(kind) : layout.place(kind) + count] = values
        words[NUM_UNITS] = len(shared.units)
        if shared.units:
            units_U4 = words[layout.units : layout.tokens].reshape(-1, 4)
            shared.write(units_U4, words[layout.paths : layout.units].reshape(-1, layout.max_sequences)[:, :count])
        words[layout.tokens : layout.tokens + num_tokens] = plan.tokens
        used = layout.pages + 3 * num_pages
        if num_pages:
            words[layout.pages : used] = np.array(plan.new_pages, dtype=np.int32).reshape(-1)
        return used
