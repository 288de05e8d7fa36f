"""What span attention computes, in plain torch: the tasks one by one, and for each row the keys of all its tasks.

Reads the plan on the host, so it serves tests and machines without Triton, never a captured step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgray.kernels.batch import BatchTables
from sgray.kernels.span_attention.work import LOAD, TILE, SpanWork


def plan_spans(
    work: SpanWork, batch: BatchTables, *, max_row_tokens: int, window: int | None, pdl: bool = False
) -> None:
    """Writes the tasks of the sequences with 1 to `max_row_tokens` tokens, those with the largest parts first."""
    per_task = work.limits.tokens_per_task
    columns = (batch.slots_B, batch.starts_B, batch.lengths_B, batch.firsts_B)
    sequences = torch.stack(columns, dim=1)[: int(batch.num_sequences_1)].tolist()
    planned = []
    for slot, start, length, first in sequences:
        if 0 < length <= max_row_tokens:
            origin = 0 if window is None else max(start - window + 1, 0) // TILE
            tiles = -(-(start + length) // TILE) - origin
            planned.append((slot, start, length, first, origin, tiles))
    total = work.limits.num_kv_heads * sum(tiles * -(-length // per_task) for _, _, length, _, _, tiles in planned)
    goal = max(-(-total // (LOAD * work.limits.num_sms)), 1)

    def splits(tiles: int) -> int:
        return max((2 * tiles + goal) // (2 * goal), 1)

    planned.sort(key=lambda sequence: -sequence[5] // splits(sequence[5]))
    num_tasks = num_rows = partial = 0
    for slot, start, length, first, origin, tiles in planned:
        parts = splits(tiles)
        for chunk in range(0, length, per_task):
            tokens = range(chunk, min(chunk + per_task, length))
            for part in range(parts):
                begin = (origin + part * tiles // parts) * TILE
                end = min((origin + (part + 1) * tiles // parts) * TILE, start + tokens.stop)
                entries = [(first + i, start + i, partial + i * parts + part) for i in tokens]
                work.tasks[num_tasks] = torch.tensor([slot, begin, end, len(tokens)])
                work.entries[num_tasks, : len(tokens)] = torch.tensor(entries, dtype=torch.int32)
                num_tasks += 1
        for i in range(length):
            work.rows[num_rows] = torch.tensor([first + i, partial, parts])
            num_rows, partial = num_rows + 1, partial + parts
    work.counts[:] = torch.tensor([num_tasks, num_rows])


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
    num_tasks, num_rows = work.counts.tolist()
    reads: dict[int, list[tuple[int, Tensor]]] = {row: [] for row in work.rows[:num_rows, 0].tolist()}
    for task in range(num_tasks):
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
