"""Attention over pages in plain torch, tile by tile. Knows nothing of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgray.kernels.batch import BatchTables
from sgray.kernels.extend_attention.work import ExtendPlan, ExtendWork

__all__ = ["ExtendPages", "ExtendPlan", "ExtendWork", "attend_extends", "plan_extends"]


@dataclass(frozen=True, slots=True)
class ExtendPages:
    """One layer's keys and values."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> ExtendPages:
        return cls(keys, values)


def plan_extends(
    work: ExtendWork, batch: BatchTables, *, min_length: int, longest: int, only_last: bool = False
) -> ExtendPlan:
    """See the package's docstring. A sequence is one tile, however many tokens it computes, and so its last one."""
    fields = torch.stack((batch.slots_B, batch.firsts_B, batch.starts_B, batch.lengths_B), dim=1)
    fields = fields[: int(batch.num_sequences_1)]
    fields = fields[fields[:, 3] >= min_length]
    work.tiles_N4.zero_()[: len(fields)] = fields
    rows = work.max_tokens * (work.num_heads // work.num_kv_heads)
    return ExtendPlan(work.tiles_N4, rows, work.max_tokens, min_length, work.max_sequences)


def attend_extends(
    query_THD: Tensor,
    pages: ExtendPages,
    page_table_SP: Tensor,
    plan: ExtendPlan,
    out_THD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """See the package's docstring; `pdl` means nothing here."""
    page_size = pages.keys.shape[1]
    group = query_THD.shape[1] // pages.keys.shape[2]
    for slot, row, start, length in plan.tiles_N4.tolist():
        if length == 0:
            continue
        end = start + length
        page_ids = page_table_SP[slot, : -(-end // page_size)].long()
        keys, values = (
            side[page_ids].flatten(0, 1)[:end].float().repeat_interleave(group, dim=1)
            for side in (pages.keys, pages.values)
        )
        scores = torch.einsum("thd,khd->htk", query_THD[row : row + length].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~_visible(start, end, window, scores.device), -torch.inf)
        weights = _softmax(scores, sinks_H)
        out_THD[row : row + length] = torch.einsum("htk,khd->thd", weights, values).to(out_THD.dtype)


def _visible(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys (columns) the rows at positions [start, end) see."""
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(end, device=device)
    return (distance >= 0) & (distance < (end if window is None else window))


def _softmax(scores_HTK: Tensor, sinks_H: Tensor | None) -> Tensor:
    if sinks_H is None:
        return scores_HTK.softmax(dim=-1)
    sinks = sinks_H[:, None, None].expand(-1, scores_HTK.shape[1], 1)
    return torch.cat((scores_HTK, sinks), dim=-1).softmax(dim=-1)[..., :-1]
