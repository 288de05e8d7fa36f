"""Span attention in Triton: one program plans, one for each task and key-value head attends, one a row and head merges.

Programs beyond the number of tasks or rows exit at once, so a grid depends on capacities alone and the hardware deals
the tasks out as programs end, the largest first. Knows nothing of layers, or of which sequences share pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgray.kernels.batch import BatchTables
from sgray.kernels.span_attention.work import LOAD, TILE, SpanLimits, SpanWork

LOG2_E = tl.constexpr(1.4426950408889634)
SHARED_BYTES = 227 * 1024  # of a multiprocessor
PLAN_WARPS = 8


@dataclass(frozen=True, slots=True)
class SpanConfig:
    """How the attention kernel is built: keys a step of its loop, warps a program, tiles in flight."""

    block_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """How the merging kernel is built: partial results a step of its loop, warps a program."""

    block_splits: int
    num_warps: int


def choose(limits: SpanLimits, itemsize: int) -> SpanConfig:
    """The deepest pipeline that fits, but a flat one where only then all sequences' programs are resident at once.

    Measured on an H200: 512 programs of equal length on 396 places take 10 to 20 % longer than on 660 with less in
    flight each; with many times more programs than places, depth wins again.
    """
    width = triton.next_power_of_2(limits.head_dim)
    block_keys = TILE if itemsize == 2 else 32
    num_warps = 8 if limits.rows_per_task * width > 64 * 128 else 4
    tiles = 2 * block_keys * width * itemsize  # keys and values of a step
    spare = limits.rows_per_task * width * itemsize + 4 * 1024
    deep, flat = (SHARED_BYTES // (depth * tiles + spare) * limits.num_sms for depth in (2, 1))
    programs = limits.max_sequences * limits.num_kv_heads
    is_deep = deep >= limits.num_sms and not deep < programs <= flat
    return SpanConfig(block_keys, num_warps, 3 if is_deep else 2)


def choose_merge(limits: SpanLimits) -> MergeConfig:
    """A step of few sequences has many partial results a row, and no other work to hide their loads behind."""
    return MergeConfig(64, 4) if limits.max_tokens <= 16 else MergeConfig(8, 1)


def plan_spans(
    work: SpanWork, batch: BatchTables, *, max_row_tokens: int, window: int | None, pdl: bool = False
) -> None:
    """Writes the tasks of the sequences with 1 to `max_row_tokens` tokens, those with the largest parts first."""
    limits = work.limits
    capacity = batch.slots_B.shape[0]
    assert capacity <= limits.max_sequences, (capacity, limits.max_sequences)
    _plan[(1,)](
        batch.slots_B,
        batch.starts_B,
        batch.lengths_B,
        batch.firsts_B,
        batch.num_sequences_1,
        work.tasks,
        work.entries,
        work.rows,
        work.counts,
        max_row_tokens,
        0 if window is None else window,
        LOAD * limits.num_sms,
        capacity,
        HEADS=limits.num_kv_heads,
        TILE_KEYS=TILE,
        TASK_TOKENS=limits.tokens_per_task,
        BLOCK_B=max(triton.next_power_of_2(capacity), 32),
        BLOCK_TASKS=max(triton.next_power_of_2(limits.max_tasks), 32),
        HAS_WINDOW=window is not None,
        PDL=pdl,
        num_warps=PLAN_WARPS,
        launch_pdl=pdl,
    )


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
    """Attention of each planned row over the keys of all its tasks."""
    _check(query_THD, keys, values, page_table_SP, work.limits, out_THD)
    limits = work.limits
    config = choose(limits, keys.element_size())
    _attend[(limits.num_kv_heads, limits.max_tasks)](
        query_THD,
        keys,
        values,
        page_table_SP,
        work.tasks,
        work.entries,
        work.counts,
        work.partials,
        work.sums,
        scale,
        softcap or 0.0,
        window or 0,
        *query_THD.stride()[:2],
        keys.stride(0),
        page_table_SP.stride(0),
        HEADS=limits.num_heads,
        GROUP=limits.num_heads // limits.num_kv_heads,
        HEAD_DIM=limits.head_dim,
        BLOCK_D=triton.next_power_of_2(limits.head_dim),
        PAGE=limits.page_size,
        ROWS=limits.rows_per_task,
        KEYS=config.block_keys,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )
    _launch_merge(work, out_THD, sinks_H, pdl)


def _launch_merge(work: SpanWork, out_THD: Tensor, sinks_H: Tensor | None, pdl: bool) -> None:
    limits = work.limits
    config = choose_merge(limits)
    _merge[(limits.num_heads, limits.max_tokens)](
        work.rows,
        work.counts,
        work.partials,
        work.sums,
        sinks_H,
        out_THD,
        *out_THD.stride()[:2],
        HEADS=limits.num_heads,
        HEAD_DIM=limits.head_dim,
        BLOCK_D=triton.next_power_of_2(limits.head_dim),
        SPLITS=config.block_splits,
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
    )


def _check(query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, limits: SpanLimits, out: Tensor) -> None:
    heads = (limits.num_heads, limits.head_dim)
    assert query.shape[1:] == heads and out.shape == query.shape, (query.shape, out.shape, heads)
    assert query.stride(2) == out.stride(2) == page_table.stride(1) == 1
    assert keys.shape[1:] == (limits.page_size, limits.num_kv_heads, limits.head_dim), keys.shape
    assert keys.stride() == values.stride() and keys[0].is_contiguous(), (keys.stride(), values.stride())
    assert query.dtype == keys.dtype == values.dtype == out.dtype


@triton.jit
def _sizes(
    start, length, planned, window, TILE_KEYS: tl.constexpr, TASK_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """First tile, number of tiles and number of tasks a part of sequences; no tiles where not planned."""
    origin = tl.maximum(start - window + 1, 0) // TILE_KEYS if HAS_WINDOW else start * 0
    tiles = tl.where(planned, tl.cdiv(start + length, TILE_KEYS) - origin, 0)
    return origin, tiles, tl.cdiv(length, TASK_TOKENS)


@triton.jit(do_not_specialize=["max_row_tokens", "window", "load", "capacity"])
def _plan(
    slots,
    starts,
    lengths,
    firsts,
    num_sequences,
    tasks,
    entries,
    rows,
    counts,
    max_row_tokens,
    window,
    load,
    capacity,
    HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TASK_TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_TASKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    b = tl.arange(0, BLOCK_B)
    exists = b < tl.minimum(tl.load(num_sequences), capacity)
    start = tl.load(starts + b, mask=exists, other=0)
    length = tl.load(lengths + b, mask=exists, other=0)
    planned = (length > 0) & (length <= max_row_tokens)
    origin, tiles, chunks = _sizes(start, length, planned, window, TILE_KEYS, TASK_TOKENS, HAS_WINDOW)
    goal = tl.maximum(tl.cdiv(tl.sum(tiles * chunks) * HEADS, load), 1)

    # Largest parts first. The sequence's number rides in the low digits of what is sorted.
    parts = tl.maximum((2 * tiles + goal) // (2 * goal), 1)
    largest = tl.where(planned, tl.cdiv(tiles, parts) * BLOCK_B + (BLOCK_B - 1 - b), -1)
    b = BLOCK_B - 1 - tl.sort(largest, descending=True) % BLOCK_B
    num_planned = tl.sum(planned.to(tl.int32))
    planned = tl.arange(0, BLOCK_B) < num_planned
    start = tl.load(starts + b, mask=planned, other=0)
    length = tl.load(lengths + b, mask=planned, other=0)
    first = tl.load(firsts + b, mask=planned, other=0)
    origin, tiles, chunks = _sizes(start, length, planned, window, TILE_KEYS, TASK_TOKENS, HAS_WINDOW)
    parts = tl.where(planned, tl.maximum((2 * tiles + goal) // (2 * goal), 1), 0)

    last_task = tl.cumsum(parts * chunks)
    first_task = last_task - parts * chunks
    last_row = tl.cumsum(length)
    last_partial = tl.cumsum(length * parts)
    first_partial = last_partial - length * parts
    num_tasks = tl.sum(parts * chunks)
    tl.store(counts, num_tasks)
    tl.store(counts + 1, tl.sum(length))
    for token in range(tl.max(length)):
        row = rows + (last_row - length + token) * 3
        present = token < length
        tl.store(row, first + token, mask=present)
        tl.store(row + 1, first_partial + token * parts, mask=present)
        tl.store(row + 2, parts, mask=present)

    # A task belongs to the sequence as many as have begun before it.
    t = tl.arange(0, BLOCK_TASKS)
    begun = tl.cumsum(tl.histogram(tl.where(planned, first_task, 0), BLOCK_TASKS, mask=planned))
    owner = tl.minimum(begun, num_planned) - 1
    owner = tl.maximum(owner, 0)
    exists = t < num_tasks
    place = t - tl.gather(first_task, owner, 0)
    partial = tl.gather(first_partial, owner, 0)
    b = tl.gather(b, owner, 0)
    start = tl.load(starts + b, mask=exists, other=0)
    length = tl.load(lengths + b, mask=exists, other=1)
    origin, tiles, chunks = _sizes(start, length, exists, window, TILE_KEYS, TASK_TOKENS, HAS_WINDOW)
    parts = tl.maximum((2 * tiles + goal) // (2 * goal), 1)
    part = place % parts
    token = place // parts * TASK_TOKENS
    num_entries = tl.minimum(length - token, TASK_TOKENS)
    task = tasks + t * 4
    end = tl.minimum((origin + (part + 1) * tiles // parts) * TILE_KEYS, start + token + num_entries)
    tl.store(task, tl.load(slots + b, mask=exists, other=0), mask=exists)
    tl.store(task + 1, (origin + part * tiles // parts) * TILE_KEYS, mask=exists)
    tl.store(task + 2, end, mask=exists)
    tl.store(task + 3, num_entries, mask=exists)
    first = tl.load(firsts + b, mask=exists, other=0)
    for index in range(tl.max(tl.where(exists, num_entries, 0))):
        entry = entries + (t * TASK_TOKENS + index) * 3
        present = exists & (index < num_entries)
        tl.store(entry, first + token + index, mask=present)
        tl.store(entry + 1, start + token + index, mask=present)
        tl.store(entry + 2, partial + (token + index) * parts + part, mask=present)


@triton.jit
def _pages(table, position, n, last, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Page ids of the tile at `position`: one where a page holds it all, else one a key. Never past position `last`."""
    if PAGE < KEYS:
        position = position + n
    return tl.load(table + tl.minimum(position, last) // PAGE).to(tl.int64)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _attend(
    query,
    keys,
    values,
    page_table,
    tasks,
    entries,
    counts,
    partials,
    sums,
    scale,
    softcap,
    window,
    query_stride,
    query_head_stride,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    task = tl.program_id(1)
    if task >= tl.load(counts):
        if PDL:  # were no program to wait, the next kernel might begin before the one before this has ended
            gdc_wait()
        return
    slot, begin = tl.load(tasks + task * 4), tl.load(tasks + task * 4 + 1)
    end, num_entries = tl.load(tasks + task * 4 + 2), tl.load(tasks + task * 4 + 3)
    r, n, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    entry = entries + (task * (ROWS // GROUP) + r // GROUP) * 3
    is_row = r < num_entries * GROUP
    head = kv_head * GROUP + r % GROUP
    row = tl.load(entry, mask=is_row, other=0).to(tl.int64)
    position = tl.load(entry + 1, mask=is_row, other=-1)
    partial = tl.load(entry + 2, mask=is_row, other=0)
    table = page_table + slot.to(tl.int64) * table_stride
    page = _pages(table, begin, n, end - 1, PAGE, KEYS)
    if PDL:
        gdc_wait()
    is_number = is_row[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(
        query + (row * query_stride + head * query_head_stride)[:, None] + d[None, :], mask=is_number, other=0.0
    )
    last = tl.minimum(position, end - 1)
    unit = scale * LOG2_E  # scores count in powers of two
    if HAS_SOFTCAP:
        unit *= 2 / softcap
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    is_real = (d < HEAD_DIM)[None, :] if BLOCK_D != HEAD_DIM else None
    zero = 0.0 if BLOCK_D != HEAD_DIM else None
    for at in tl.range(begin, end, KEYS):
        # The next page's id is carried along: a load of it that this step's loads wait for would halve the pipeline.
        base = page * page_stride + kv_head * HEAD_DIM
        page = _pages(table, at + KEYS, n, end - 1, PAGE, KEYS)
        # Unwritten memory may hold NaN: keys past the end are the last one again. A mask would take 37 more registers.
        token = tl.minimum(n, end - 1 - at)
        if PAGE < KEYS:
            base = base[:, None]
            token = (token + at) & (PAGE - 1)
        if PAGE > KEYS:
            base += at % PAGE * (HEADS // GROUP * HEAD_DIM)
        place = token[:, None] * (HEADS // GROUP * HEAD_DIM) + d[None, :]
        k = tl.load(keys + base + place, mask=is_real, other=zero)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * unit
        if HAS_SOFTCAP:
            scores = softcap * LOG2_E * (1 - 2 / (1 + tl.exp2(scores)))  # tanh
        is_seen = (at + n)[None, :] <= last[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & ((at + n)[None, :] > (position - window)[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(scores - anchor[:, None])
        decay = tl.exp2(largest - anchor)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values + base + place, mask=is_real, other=zero)
        out = tl.dot(weights.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
        largest = larger
    if PDL:
        gdc_launch_dependents()
    total_or_one = tl.where(total > 0, total, 1.0)
    result = partial * HEADS + head
    tl.store(sums + result, tl.where(total > 0, largest + tl.log2(total_or_one), -float("inf")), mask=is_row)
    tl.store(partials + result[:, None] * HEAD_DIM + d[None, :], out / total_or_one[:, None], mask=is_number)


@triton.jit
def _merge(
    rows,
    counts,
    partials,
    sums,
    sinks,
    out,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    index = tl.program_id(1)
    if index >= tl.load(counts + 1):
        if PDL:
            gdc_wait()
        return
    row, first = tl.load(rows + index * 3).to(tl.int64), tl.load(rows + index * 3 + 1)
    num_splits = tl.load(rows + index * 3 + 2)
    largest = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.where(largest > -float("inf"), 1.0, 0.0)
    if PDL:
        gdc_wait()
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    is_number = (d < HEAD_DIM)[None, :]
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for base in tl.range(0, num_splits, SPLITS):
        exists = base + s < num_splits
        result = (first + base + s) * HEADS + head
        logs = tl.load(sums + result, mask=exists, other=-float("inf"))
        parts = tl.load(partials + result[:, None] * HEAD_DIM + d[None, :], mask=exists[:, None] & is_number, other=0.0)
        larger = tl.maximum(largest, tl.max(logs, 0))
        anchor = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(logs - anchor)
        decay = tl.exp2(largest - anchor)
        total = total * decay + tl.sum(weights, 0)
        mixed = mixed * decay + tl.sum(parts * weights[:, None], 0)
        largest = larger
    if PDL:
        gdc_launch_dependents()
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_stride + head * out_head_stride + d, mixed.to(out.dtype.element_ty), mask=d < HEAD_DIM)
