"""A plan's lists become the tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sgray.engine.plan import StepPlan
from sgray.layers.attention import Span
from sgray.memory.pool import KVPool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input: flat tokens and positions, (T,); the sequences' spans; the memory rows of `StepContext`."""

    tokens: Tensor
    positions: Tensor
    spans: list[Span]
    key_rows: tuple[Tensor, ...]
    value_rows: tuple[Tensor, ...]


def build_batch(plan: StepPlan, tokens: list[int], page_rows: Sequence[list[int]], pool: KVPool) -> Batch:
    """The batch of a plan, whose tokens are `tokens`; `page_rows[i]` is `plan.slots[i]`'s, new pages included."""
    firsts = [0, *accumulate(plan.lengths)][:-1]
    spans = [Span(*span) for span in zip(firsts, plan.starts, plan.lengths, page_rows, strict=True)]
    positions = [position for span in spans for position in range(span.start, span.start + span.length)]
    device = pool.pages.device
    key_rows, value_rows = _memory_rows(spans, pool)
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        spans=spans,
        key_rows=key_rows,
        value_rows=value_rows,
    )


def _memory_rows(spans: list[Span], pool: KVPool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """For every layer, the rows of the pool that take the step's keys and values."""
    size, num_layers = pool.shape.page_size, pool.shape.num_layers
    page_stride = num_layers * 2 * size
    first_layer = [
        span.pages[position // size] * page_stride + position % size
        for span in spans
        for position in range(span.start, span.start + span.length)
    ]
    offsets = torch.arange(num_layers * 2)[:, None] * size
    rows = (torch.tensor(first_layer) + offsets).to(pool.pages.device).unbind(0)
    return rows[0::2], rows[1::2]
