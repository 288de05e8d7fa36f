"""Attention of extends over pages in Triton. Knows nothing of the scheduler, and decides nothing but sizes.

A tile holds consecutive tokens of one sequence, each with the query heads that share a key head: few tokens after a
long cached prefix fill it as well as many (FlashAttention-3's packing, arXiv 2407.08608). Softmax is online, in powers
of two (arXiv 2205.14135). Keys that every row sees are taken without a mask, and the next page's id is fetched one
iteration ahead, else Triton's pipeline spends half of its stages on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgray.kernels.batch import BatchTables
from sgray.kernels.boxes import Boxes, boxes_of
from sgray.kernels.extend_attention import hopper
from sgray.kernels.extend_attention.work import LONG, ExtendPlan, ExtendWork, choose, choose_rows

__all__ = ["ExtendPages", "ExtendPlan", "ExtendWork", "attend_extends", "plan_extends"]

PLAN_CELLS = 16384  # comparisons of one planning program: what fits in its registers


@dataclass(frozen=True, slots=True)
class ExtendPages:
    """One layer's keys and values; also as descriptors for bulk loads where the device and the layout allow them."""

    keys: Tensor
    values: Tensor
    boxes: Boxes | None
    flat: hopper.FlatPages | None = None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> ExtendPages:
        return cls(keys, values, boxes_of(keys, values), hopper.flat_pages(keys, values))

    @property
    def large_from(self) -> int:
        """Keys of a sequence from which on large tiles pay."""
        return LONG if self.flat is None else 0


def plan_extends(
    work: ExtendWork, batch: BatchTables, *, min_length: int, longest: int, only_last: bool = False
) -> ExtendPlan:
    """See the package's docstring."""
    rows = choose_rows(work.head_dim, longest, work.large_from)
    tokens = rows // (work.num_heads // work.num_kv_heads)
    plan = ExtendPlan(work.tiles_N4, rows, tokens, min_length, work.max_sequences)
    sequences = triton.next_power_of_2(batch.slots_B.shape[0])
    tiles = max(PLAN_CELLS // sequences, 1)
    _plan[(triton.cdiv(plan.capacity(work.max_tokens), tiles),)](
        batch.slots_B,
        batch.starts_B,
        batch.lengths_B,
        batch.firsts_B,
        batch.num_sequences_1,
        work.tiles_N4,
        work.tiles_N4.shape[0],
        min_length,
        TOKENS=tokens,
        MOST=1 if only_last else work.max_tokens,
        SEQUENCES=sequences,
        TILES=tiles,
    )
    return plan


@triton.jit(do_not_specialize=["num_tiles", "min_length"])
def _plan(
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    firsts_ptr,
    num_sequences_ptr,
    tiles_ptr,
    num_tiles,
    min_length,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Every program counts the tiles of all sequences, each at most its last `MOST`, and writes its own share of them.

    A sequence's tiles come last first, as the last has the most keys: long programs that start late end late.
    """
    index = tl.arange(0, SEQUENCES)
    lengths = tl.load(lengths_ptr + index, mask=index < tl.load(num_sequences_ptr), other=0)
    counts = tl.where(lengths >= min_length, (lengths + TOKENS - 1) // TOKENS, 0)
    ends = tl.cumsum(tl.minimum(counts, MOST))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    is_later = ends[None, :] > tile[:, None]
    sequence = SEQUENCES - tl.sum(is_later.to(tl.int32), 1)
    is_used = sequence < SEQUENCES
    end = tl.min(tl.where(is_later, ends[None, :], 2147483647), 1)
    length = tl.load(lengths_ptr + sequence, mask=is_used, other=0)
    left_out = tl.maximum((length + TOKENS - 1) // TOKENS - MOST, 0)
    offset = tl.where(is_used, left_out + end - 1 - tile, 0) * TOKENS
    first = tl.load(firsts_ptr + sequence, mask=is_used, other=0)
    start = tl.load(starts_ptr + sequence, mask=is_used, other=0)
    slot = tl.load(slots_ptr + sequence, mask=is_used, other=0)
    fields = tiles_ptr + tile * 4
    tl.store(fields, slot, mask=tile < num_tiles)
    tl.store(fields + 1, first + offset, mask=tile < num_tiles)
    tl.store(fields + 2, start + offset, mask=tile < num_tiles)
    tl.store(fields + 3, tl.minimum(length - offset, TOKENS), mask=tile < num_tiles)


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
    """See the package's docstring."""
    num_tokens, num_heads, head_dim = query_THD.shape
    page_size, num_kv_heads = pages.keys.shape[1:3]
    if pages.flat is not None and plan.rows == hopper.ROWS and window is None and softcap is None and sinks_H is None:
        sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads}
        hopper.attend(query_THD, pages.flat, page_table_SP, plan, out_THD, **sizes, scale=scale)
        return
    shape = choose(query_THD.dtype, head_dim, plan.rows, has_boxes=pages.boxes is not None)
    keys, values = pages.boxes or (pages.keys, pages.values)
    # Without a cap the scale takes the change of base along; with one it divides by the cap, and the cap takes it.
    factor = scale * math.log2(math.e) if softcap is None else 2 * math.log2(math.e) * scale / softcap
    grid = (plan.capacity(num_tokens) * num_kv_heads,)
    _attend[grid](
        query_THD,
        keys,
        values,
        page_table_SP,
        plan.tiles_N4,
        query_THD if sinks_H is None else sinks_H,
        out_THD,
        factor,
        0.0 if softcap is None else softcap * math.log2(math.e),
        0 if window is None else window,
        page_table_SP.stride(0),
        pages.keys.stride(0),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        ROWS=plan.rows,
        KEYS=shape.keys,
        STAGES=shape.stages,
        HAS_BOXES=pages.boxes is not None,
        HAS_WINDOW=window is not None,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks_H is not None,
        PDL=pdl,
        num_warps=shape.warps,
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit(do_not_specialize=["window"])
def _attend(
    query_ptr,
    keys,
    values,
    page_table_ptr,
    tiles_ptr,
    sinks_ptr,
    out_ptr,
    factor,
    cap,
    window,
    table_stride,
    page_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BOXES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one key head; those of a tile are neighbours, as they end at the same time.

    A row is a query head of a token; where the group does not divide the tile, the rows left over do nothing.
    """
    GROUP: tl.constexpr = H // K
    TOKENS: tl.constexpr = ROWS // GROUP
    if PDL:
        gdc_wait()
    kv_head = tl.program_id(0) % K
    tile = tiles_ptr + (tl.program_id(0) // K) * 4
    count = tl.load(tile + 3)
    if count == 0:
        return
    table = page_table_ptr + tl.load(tile).to(tl.int64) * table_stride
    row = tl.load(tile + 1)
    position = tl.load(tile + 2)
    end = position + count

    lane = tl.arange(0, ROWS)
    token = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    is_used = (token < tl.minimum(count, TOKENS))[:, None]
    cells = ((row + token).to(tl.int64) * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    query = tl.load(query_ptr + cells, mask=is_used, other=0.0)
    positions = position + tl.minimum(token, count - 1)

    # Finite, so that a row which sees nothing in its first keys subtracts no infinities; a sink is a key without value.
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        best = tl.maximum(best, sink)
        total = tl.exp2(sink - best)
    mixed = tl.zeros([ROWS, D], tl.float32)

    begin = 0
    full = (position + 1) // KEYS * KEYS
    if HAS_WINDOW:
        begin = tl.maximum(position + 1 - window, 0) // KEYS * KEYS
        inside = tl.minimum((tl.maximum(end - window, 0) + KEYS - 1) // KEYS * KEYS, full)
        best, total, mixed = _advance(
            best, total, mixed, query, keys, values, table, begin, inside, end, positions, factor, cap, window,
            page_stride, kv_head, K, D, PAGE, KEYS, STAGES, HAS_BOXES, HAS_WINDOW, HAS_CAP, True,
        )  # fmt: skip
        begin = inside
    best, total, mixed = _advance(
        best, total, mixed, query, keys, values, table, begin, full, end, positions, factor, cap, window,
        page_stride, kv_head, K, D, PAGE, KEYS, STAGES, HAS_BOXES, HAS_WINDOW, HAS_CAP, False,
    )  # fmt: skip
    best, total, mixed = _advance(
        best, total, mixed, query, keys, values, table, full, end, end, positions, factor, cap, window,
        page_stride, kv_head, K, D, PAGE, KEYS, STAGES, HAS_BOXES, HAS_WINDOW, HAS_CAP, True,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    tl.store(out_ptr + cells, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_used)


@triton.jit
def _advance(
    best, total, mixed, query, keys, values, table, begin, stop, end, positions, factor, cap, window,
    page_stride, kv_head,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    HAS_BOXES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys [begin, stop), both multiples of KEYS or `stop` the tile's end.

    Keys from `end` on are seen by no row and may hold anything.
    """
    step = tl.arange(0, KEYS)
    column = tl.arange(0, D)
    last = (end - 1) // PAGE  # entries behind it are garbage
    page = _page(table, begin, last, step, PAGE, KEYS)
    for key in tl.range(begin, stop, KEYS, num_stages=STAGES):
        current = page
        page = _page(table, key + KEYS, last, step, PAGE, KEYS)
        if HAS_BOXES:
            k = keys.load([current, key % PAGE, kv_head * D]).reshape(KEYS, D)
        else:
            cells = current.to(tl.int64) * page_stride + (key + step) % PAGE * (K * D) + kv_head * D
            cells = cells[:, None] + column[None, :]
            is_written = (key + step < end)[:, None]
            k = tl.load(keys + cells, mask=is_written, other=0.0) if MASKED else tl.load(keys + cells)
        scores = tl.dot(query, k.T, input_precision="ieee")
        if HAS_CAP:
            # tanh; the bound, far behind where it is 1, keeps the power finite.
            scores = cap * (1 - 2 / (1 + tl.exp2(tl.minimum(scores * factor, 100.0))))
        if MASKED:
            is_seen = (key + step)[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen &= (key + step)[None, :] > positions[:, None] - window
            scores = tl.where(is_seen, scores, -float("inf"))
        if HAS_CAP:
            better = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - better[:, None])
        else:  # scaled here, where it is one multiply-add with the subtraction
            better = tl.maximum(best, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - better[:, None])
        shrink = tl.exp2(best - better)
        best = better
        total = total * shrink + tl.sum(weights, 1)
        if HAS_BOXES:
            v = values.load([current, key % PAGE, kv_head * D]).reshape(KEYS, D)
            if MASKED:
                v = tl.where((key + step < end)[:, None], v, 0.0)
        else:
            v = tl.load(values + cells, mask=is_written, other=0.0) if MASKED else tl.load(values + cells)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return best, total, mixed


@triton.jit
def _page(table, key, last, step, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of `key`, or of each of its KEYS successors where pages are smaller."""
    if PAGE >= KEYS:
        page = tl.load(table + tl.minimum(key // PAGE, last))
    else:
        page = tl.load(table + tl.minimum((key + step) // PAGE, last))
    return page
