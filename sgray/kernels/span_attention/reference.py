"""What span attention computes, in plain torch: the tasks one by one, and for each row the keys of all its tasks.

Reads the plan on the host, so it serves tests and machines without Triton, never a captured step.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from sgray.kernels.batch import MAX_PLACE, BatchTables
from sgray.kernels.span_attention.work import TILE, SpanWork


def plan_spans(
    work: SpanWork, batch: BatchTables, *, max_row_tokens: int, window: int | None, pdl: bool = False
) -> None:
    """Cuts in equal shares what shared units read, then what sequences with 1 to `max_row_tokens` tokens do."""
    units = _shared_units(work, batch, max_row_tokens) if window is None else []
    num_shared = len(units)
    units += _own_units(work, batch, units, max_row_tokens, window)
    num_bins = work.limits.num_bins
    share = max(-(-sum(unit.tiles for unit in units) // num_bins), 1)
    cuts = _cut_whole(units[:num_shared], share, num_bins)
    bins = list(range(len(cuts)))
    whole = {id(unit) for unit, _, _ in cuts}
    units_left = [unit for unit in units if id(unit) not in whole]
    share = max(-(-sum(unit.tiles for unit in units_left) // (num_bins - len(cuts))), 1)
    at = 0
    for unit in units_left:
        places = [at, *range((at // share + 1) * share, at + unit.tiles, share), at + unit.tiles]
        for begin, end in itertools.pairwise(places):
            if begin % share == 0:
                bins.append(len(cuts))
            cuts.append((unit, unit.begin + (begin - at) * TILE, min(unit.begin + (end - at) * TILE, unit.end)))
        at += unit.tiles
    work.bins[: num_bins + 1] = torch.tensor(bins + [len(cuts)] * (num_bins + 1 - len(bins)))
    _write(work, cuts)


@dataclass(frozen=True)
class _Unit:
    """Keys of a slot, and the rows with their positions that read them."""

    slot: int
    begin: int
    end: int
    rows: list[tuple[int, int]]

    @property
    def tiles(self) -> int:
        return -(-(self.end - self.begin) // TILE)


Cut = tuple[_Unit, int, int]


def _cut_whole(units: list[_Unit], share: int, num_bins: int) -> list[Cut]:
    """Units of a share or more in even parts, each of which is a bin of its own; none where no bin would be left."""
    long = [(unit, -(-unit.tiles // (share + share // 2))) for unit in units if unit.tiles >= share]
    if sum(parts for _, parts in long) >= num_bins:
        return []
    cuts: list[Cut] = []
    for unit, parts in long:
        step = -(-unit.tiles // parts) * TILE
        cuts += [(unit, begin, min(begin + step, unit.end)) for begin in range(unit.begin, unit.end, step)]
    return cuts


def _sequences(batch: BatchTables) -> list[list[int]]:
    columns = (batch.slots_B, batch.starts_B, batch.lengths_B, batch.firsts_B)
    return torch.stack(columns, dim=1)[: int(batch.num_sequences_1)].tolist()


def _shared_units(work: SpanWork, batch: BatchTables, max_row_tokens: int) -> list[_Unit]:
    shared = batch.shared
    if shared is None or not work.limits.max_shared or not int(shared.num_units_1):
        return []
    units = [
        _Unit(slot, begin, end, [(-1, -1)] * count)
        for slot, begin, end, count in shared.units_U4[: int(shared.num_units_1)].tolist()
    ]
    for b, (_, start, length, first) in enumerate(_sequences(batch)):
        for word in shared.paths_DB[:, b].tolist() if length <= max_row_tokens else []:
            for index in range(length if word >= 0 else 0):
                units[word // MAX_PLACE].rows[word % MAX_PLACE + index] = (first + index, start + index)
    return units


def _own_units(
    work: SpanWork, batch: BatchTables, shared: list[_Unit], max_row_tokens: int, window: int | None
) -> list[_Unit]:
    """What each sequence reads for itself, in chunks of as many tokens as a task takes."""
    covered: dict[int, int] = defaultdict(int)
    for unit in shared:
        for row, _ in unit.rows:
            covered[row] = max(covered[row], unit.end)
    units, per_task = [], work.limits.tokens_per_task
    for chunk in range(0, max_row_tokens, per_task):
        for slot, start, length, first in _sequences(batch):
            if chunk < length <= max_row_tokens:
                low, high = start + chunk, start + min(chunk + per_task, length)
                begin = covered[first] if window is None else max(low - window + 1, 0) // TILE * TILE
                rows = [(first + position - start, position) for position in range(low, high)]
                units.append(_Unit(slot, begin, high, rows))
    return units


def _write(work: SpanWork, cuts: list[Cut]) -> None:
    """The tasks, and which rows have several of them: those are listed in the order in which their own keys are, each
    with its parts in order of the keys."""
    tasks_of: dict[int, list[int]] = defaultdict(list)
    for task, (unit, _, _) in sorted(enumerate(cuts), key=lambda cut: cut[1][1]):
        for row, _ in unit.rows:
            tasks_of[row].append(task)
    order = list(dict.fromkeys(row for unit, _, _ in cuts for row, position in unit.rows if position < unit.end))
    partial_of: dict[tuple[int, int], int] = {}
    num_rows = 0
    for row in order:
        if len(tasks_of[row]) > 1:
            work.rows[num_rows] = torch.tensor([row, len(partial_of), len(tasks_of[row])])
            partial_of |= {(row, task): len(partial_of) + i for i, task in enumerate(tasks_of[row])}
            num_rows += 1
    work.num_rows_1.fill_(num_rows)
    for task, (unit, begin, end) in enumerate(cuts):
        work.tasks[task] = torch.tensor([unit.slot, begin, end, len(unit.rows)])
        entries = [(row, position, partial_of.get((row, task), -1)) for row, position in unit.rows]
        work.entries[task, : len(entries)] = torch.tensor(entries, dtype=torch.int32)


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
    boxes: object = None,
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
