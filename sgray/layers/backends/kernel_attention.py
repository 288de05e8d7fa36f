"""Attention by this project's kernels: what is made once for a model, and what once a step.

Sequences with few new tokens are computed by spans (`span_attention`), those with many by tiles (`extend_attention`); a
step may have both. Which sequences are which is found on the device, so that one CUDA graph serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgray.kernels.batch import BatchTables
from sgray.kernels.extend_attention.kernel import ExtendPages, attend_extends, plan_extends
from sgray.kernels.extend_attention.work import ExtendPlan, ExtendWork
from sgray.kernels.launch import features
from sgray.kernels.rope_store.kernel import rope_store
from sgray.kernels.span_attention.kernel import attend_spans, plan_spans
from sgray.kernels.span_attention.work import SpanLimits, SpanWork
from sgray.kernels.step_inputs.words import StepRows
from sgray.layers.attention import Attention, KeysValues

DECODE_ROWS = 16  # query rows of a span's task: the least that tensor cores take
MIXED_ROWS = 64  # so that short extends read their prefix once, and several sequences one that they share
SHARED_UNITS = 2  # that every sequence of the largest batch may read; in smaller ones more


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What attention must provide for: heads of this rank, and the largest step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequences: int
    max_tokens: int
    max_length: int

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much a step may hold; what is launched depends on this alone.

    `num_short` tokens of sequences with at most `max_short` of them each, `num_long` the others. `longest`: most tokens
    of a sequence, cached ones included. `is_shared`: the tasks are so wide that several sequences fit in them, which is
    so whenever sequences have more than one token.
    """

    num_sequences: int
    num_tokens: int
    max_short: int
    num_short: int
    num_long: int
    longest: int
    is_shared: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether no sequence has more than one token."""
        return self.max_short == 1 and self.num_long == 0


class KernelAttention:
    """Pages, rotations and the memory for plans of one model. `windows[layer]` is None where all tokens are seen."""

    def __init__(
        self,
        layers: Sequence[KeysValues],
        page_table_SP: Tensor,
        rotation_PD: Tensor,
        windows: Sequence[int | None],
        sizes: AttentionSizes,
    ) -> None:
        keys = layers[0][0]
        self._pages = [ExtendPages.of(*layer) for layer in layers]
        self._page_table = page_table_SP
        self._rotation = rotation_PD
        self._windows = list(windows)
        self._sizes = sizes
        self._scale = sizes.head_dim**-0.5
        self._has_pdl = features(keys.device).has_pdl
        self._decode = {window: self._span_work(keys, DECODE_ROWS, 1) for window in set(windows)}
        self._mixed = {window: self._span_work(keys, MIXED_ROWS, self.max_short) for window in set(windows)}
        self._extend = ExtendWork.allocate(
            max_sequences=sizes.max_sequences,
            max_tokens=sizes.max_tokens,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            device=keys.device,
            large_from=self._pages[0].large_from,
        )

    @property
    def max_short(self) -> int:
        """New tokens of a sequence up to which spans read its keys: as many as one task takes."""
        return max(1, _rows_for(MIXED_ROWS, self._sizes.group) // self._sizes.group)

    @property
    def max_shared(self) -> int:
        """How often the tokens of a step may read shared units, each token counted once a unit."""
        return SHARED_UNITS * self._sizes.max_sequences

    def plan(self, rows: StepRows, batch: BatchTables, size: StepSize) -> KernelStep:
        """Launches the planning of a step; for its layers."""
        works = self._decode if size.max_short == 1 and not size.is_shared else self._mixed
        spans: dict[int | None, SpanWork] = {}
        if size.num_short:
            for window, work in works.items():
                spans[window] = work.for_capacity(batch.slots_B.shape[0], size.num_short)
                plan_spans(spans[window], batch, max_row_tokens=size.max_short, window=window, pdl=self._has_pdl)
        return KernelStep(self, rows, spans, self.tiles(batch, size), batch, size)

    def tiles(self, batch: BatchTables, size: StepSize, *, only_last: bool = False) -> ExtendPlan | None:
        """Launches the planning of sequences with many tokens, or of the last tile of each."""
        if not size.num_long:
            return None
        length = size.max_short + 1
        return plan_extends(self._extend, batch, min_length=length, longest=size.longest, only_last=only_last)

    def mix(self, step: KernelStep, attention: Attention, qkv_TX: Tensor, tiles: ExtendPlan | None) -> Tensor:
        """One layer of a step; of the sequences with many tokens only what is in `tiles`."""
        sizes, layer = self._sizes, attention.layer
        pages, window = self._pages[layer], self._windows[layer]
        query_THD, out_THD = torch.empty(
            (2, qkv_TX.shape[0], sizes.num_heads, sizes.head_dim), dtype=qkv_TX.dtype, device=qkv_TX.device
        )
        norm = attention.qk_norm
        rope_store(
            qkv_TX,
            query_THD,
            pages.keys,
            pages.values,
            step.rows.positions_T,
            step.rows.locations_T,
            self._rotation,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            query_norm_D=None if norm is None else norm.query.weight,
            key_norm_D=None if norm is None else norm.key.weight,
            eps=0.0 if norm is None else norm.query.eps,
            pdl=self._has_pdl,
        )
        if tiles is not None:
            attend_extends(
                query_THD,
                pages,
                self._page_table,
                tiles,
                out_THD,
                scale=self._scale,
                window=window,
                pdl=self._has_pdl,
            )
        if window in step.spans:
            attend_spans(
                query_THD,
                pages.keys,
                pages.values,
                self._page_table,
                step.spans[window],
                out_THD,
                scale=self._scale,
                window=window,
                boxes=pages.boxes,
                pdl=self._has_pdl,
            )
        return out_THD.flatten(1)

    def _span_work(self, keys: Tensor, rows: int, max_short: int) -> SpanWork:
        sizes = self._sizes
        limits = SpanLimits(
            max_sequences=sizes.max_sequences,
            max_tokens=min(sizes.max_tokens, sizes.max_sequences * max_short),
            max_length=sizes.max_length,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            page_size=keys.shape[1],
            rows_per_task=_rows_for(rows, sizes.group),
            num_sms=features(keys.device).num_sms,
            max_shared=0 if rows == DECODE_ROWS else self.max_shared,
        )
        return SpanWork.allocate(limits, keys.device)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """The planned attention of one step: tasks by window, and tiles, where there are any.

    Rows alone are for the last layer: their tiles are planned in the place of all others.
    """

    model: KernelAttention
    rows: StepRows
    spans: dict[int | None, SpanWork]
    tiles: ExtendPlan | None
    batch: BatchTables
    size: StepSize

    def mix(self, attention: Attention, qkv_TX: Tensor, rows_R: Tensor | None = None) -> Tensor:
        if rows_R is None:
            return self.model.mix(self, attention, qkv_TX, self.tiles)
        tiles = self.model.tiles(self.batch, self.size, only_last=True)
        return self.model.mix(self, attention, qkv_TX, tiles).index_select(0, rows_R)


def _rows_for(rows: int, group: int) -> int:
    """At least `rows`, and enough for the heads of one token."""
    while rows < group:
        rows *= 2
    return rows
