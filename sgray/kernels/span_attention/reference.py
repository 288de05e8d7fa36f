"""What span attention computes, in plain torch: the tasks one by one, and for each row the keys of all its tasks.

Reads the plan on the host, so it serves tests and machines without Triton, never a captured step.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import torch
from torch import Tensor

from sgray.kernels.batch import BatchTables
from sgray.kernels.span_attention.work import TILE, SpanWork


def plan_spans(
    work: SpanWork, batch: BatchTables, *, max_row_tokens: int, window: int | None, pdl: bool = False
) -> None:
    """Cuts the tiles of the sequences with 1 to `max_row_tokens` tokens, laid end to end, in equal shares."""
    per_task, num_bins = work.limits.tokens_per_task, work.limits.num_bins
    columns = (batch.slots_B, batch.starts_B, batch.lengths_B, batch.firsts_B)
    sequences = torch.stack(columns, dim=1)[: int(batch.num_sequences_1)].tolist()
    units = []
    for chunk in range(0, max_row_tokens, per_task):
        for slot, start, length, first in sequences:
            if chunk < length <= max_row_tokens:
                low, high = start + chunk, start + min(chunk + per_task, length)
                origin = 0 if window is None else max(low - window + 1, 0) // TILE
                units.append((slot, origin, low, high, first + chunk, -(-high // TILE) - origin))
    share = max(-(-sum(unit[5] for unit in units) // num_bins), 1)
    bins: list[int] = []
    at = num_tasks = num_rows = partial = 0
    for slot, origin, low, high, row, tiles in units:
        places = [at, *range((at // share + 1) * share, at + tiles, share), at + tiles]
        parts, tokens = len(places) - 1, high - low
        for part, (begin, end) in enumerate(itertools.pairwise(places)):
            if begin % share == 0:
                bins.append(num_tasks)
            span = ((origin + begin - at) * TILE, min((origin + end - at) * TILE, high))
            partials = [partial + i * parts + part if parts > 1 else -1 for i in range(tokens)]
            entries = [(row + i, low + i, partials[i]) for i in range(tokens)]
            work.tasks[num_tasks] = torch.tensor([slot, *span, tokens])
            work.entries[num_tasks, :tokens] = torch.tensor(entries, dtype=torch.int32)
            num_tasks += 1
        for i in range(tokens if parts > 1 else 0):
            work.rows[num_rows] = torch.tensor([row + i, partial, parts])
            num_rows, partial = num_rows + 1, partial + parts
        at += tiles
    work.bins[: num_bins + 1] = torch.tensor(bins + [num_tasks] * (num_bins + 1 - len(bins)))
    work.num_rows_1.fill_(num_rows)


def attend_spans(
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table_SP: Tensor,
    work: SpanWork,
    out_THD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Attention of each planned row over the keys of all its tasks at once, in float32."""
    reads: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for task in range(int(work.bins[work.limits.num_bins])):
        slot, begin, end, num_entries = work.tasks[task].tolist()
        positions = torch.arange(begin, end, device=keys.device)
        for row, last, _ in work.entries[task, :num_entries].tolist():
            low = -1 if window is None else last - window
            reads[row].append((slot, positions[(positions <= last) & (positions > low)]))
    page_size = keys.shape[1]
    group = query_THD.shape[1] // keys.shape[2]
    for row, spans in reads.items():
        pages = torch.cat([page_table_SP[slot, positions // page_size] for slot, positions in spans]).long()
        tokens = torch.cat([positions % page_size for _, positions in spans])
        keys_HLD, values_HLD = (
            side[pages, tokens].float().repeat_interleave(group, dim=1).transpose(0, 1) for side in (keys, values)
        )
        scores_HL = scale * (keys_HLD @ query_THD[row].float().unsqueeze(2)).squeeze(2)
        if softcap is not None:
            scores_HL = softcap * torch.tanh(scores_HL / softcap)
        sinks = torch.full_like(scores_HL[:, 0], -math.inf) if sinks_H is None else sinks_H.float()
        weights_HL = torch.cat([scores_HL, sinks.unsqueeze(1)], dim=1).softmax(dim=1)[:, :-1]
        out_THD[row] = (weights_HL.unsqueeze(1) @ values_HLD).squeeze(1).to(out_THD.dtype)
