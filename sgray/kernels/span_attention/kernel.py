"""Span attention in Triton: one program plans, a fixed number attend to a bin of tasks each, and some merge rows.

A grid depends on capacities alone: programs without tasks or rows exit at once. Every other program reads the same
number of tiles, whatever the lengths are. Knows nothing of layers, or of which sequences share pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgray.kernels.batch import MAX_DEPTH, MAX_PLACE, BatchTables
from sgray.kernels.boxes import Boxes
from sgray.kernels.span_attention.work import SHARED_BYTES, TILE, SpanLimits, SpanWork

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: a row that sees nothing yet subtracts no infinities
NEVER = tl.constexpr(2**30)  # a position that no row sees
PLAN_WARPS = 4


@dataclass(frozen=True, slots=True)
class SpanConfig:
    """How the attention kernel is built: keys a step of its loop, warps a program, tiles in flight, and whether whole
    boxes are loaded if there are any: a wide task has more to do than to reckon with addresses."""

    block_keys: int
    num_warps: int
    num_stages: int
    takes_boxes: bool


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """How the merging kernel is built: heads a program, partial results a step of its loop, warps a program."""

    block_heads: int
    block_splits: int
    num_warps: int


def choose(limits: SpanLimits, itemsize: int) -> SpanConfig:
    """Two tiles in flight while one is computed, where a multiprocessor has the memory."""
    width = triton.next_power_of_2(limits.head_dim)
    is_deep = limits.program_bytes(depth=2) <= SHARED_BYTES
    return SpanConfig(
        block_keys=TILE if itemsize == 2 else TILE // 2,
        num_warps=8 if limits.rows_per_task * width > 64 * 128 or itemsize > 2 else 4,
        num_stages=3 if is_deep else 2,
        takes_boxes=limits.rows_per_task == 64 and itemsize == 2 and width == limits.head_dim,
    )


def choose_merge(limits: SpanLimits) -> MergeConfig:
    """As many partial results at once as a cut row has if sequences are alike; a thread takes 128 numbers of them.

    Few warps, because programs that wait for the attention to end take room from it: with four times as many, no batch
    of 1 to 256 sequences was faster on an H200, and the smallest took 15 % longer.
    """
    parts = limits.num_bins // limits.max_sequences + 2
    splits = min(max(triton.next_power_of_2(parts), 8), 64)
    heads = 4 if splits == 8 else 1
    numbers = splits * heads * triton.next_power_of_2(limits.head_dim)
    return MergeConfig(heads, splits, max(numbers // 4096, 1))


def plan_spans(
    work: SpanWork, batch: BatchTables, *, max_row_tokens: int, window: int | None, pdl: bool = False
) -> None:
    """Cuts in equal shares what shared units read, then what sequences with 1 to `max_row_tokens` tokens do."""
    limits = work.limits
    capacity = batch.slots_B.shape[0]
    assert capacity <= limits.max_sequences, (capacity, limits.max_sequences)
    shared = batch.shared if window is None and limits.max_shared else None
    _plan[(1,)](
        batch.slots_B,
        batch.starts_B,
        batch.lengths_B,
        batch.firsts_B,
        batch.num_sequences_1,
        None if shared is None else shared.units_U4,
        None if shared is None else shared.paths_DB,
        None if shared is None else shared.num_units_1,
        work.bins,
        work.tasks,
        work.entries,
        work.rows,
        work.num_rows_1,
        work.parts,
        max_row_tokens,
        0 if window is None else window,
        limits.num_bins,
        capacity,
        0 if shared is None else shared.paths_DB.stride(0),
        TILE_KEYS=TILE,
        TASK_TOKENS=limits.tokens_per_task,
        BLOCK_B=max(triton.next_power_of_2(capacity), 64),
        BLOCK_U=0 if shared is None else max(triton.next_power_of_2(shared.units_U4.shape[0]), 64),
        BLOCK_BINS=triton.next_power_of_2(limits.num_bins + 1),
        DEPTH=MAX_DEPTH,
        PLACES=MAX_PLACE,
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
    boxes: Boxes | None = None,
    pdl: bool = False,
) -> None:
    """Attention of each planned row over the keys of all its tasks."""
    _check(query_THD, keys, values, page_table_SP, work.limits, out_THD)
    limits = work.limits
    config = choose(limits, keys.element_size())
    has_boxes = boxes is not None and config.takes_boxes
    _attend[(limits.num_kv_heads, limits.num_bins)](
        query_THD,
        keys,
        values,
        *(boxes if boxes is not None and has_boxes else (None, None)),
        page_table_SP,
        work.bins,
        work.tasks,
        work.entries,
        work.partials,
        work.sums,
        sinks_H,
        out_THD,
        scale,
        softcap or 0.0,
        window or 0,
        *query_THD.stride()[:2],
        *out_THD.stride()[:2],
        keys.stride(0),
        page_table_SP.stride(0),
        HEADS=limits.num_heads,
        GROUP=limits.num_heads // limits.num_kv_heads,
        HEAD_DIM=limits.head_dim,
        BLOCK_D=triton.next_power_of_2(limits.head_dim),
        PAGE=limits.page_size,
        ROWS=limits.rows_per_task,
        KEYS=config.block_keys,
        HAS_BOXES=has_boxes,
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
    _merge[(triton.cdiv(limits.num_heads, config.block_heads), limits.max_merged)](
        work.rows,
        work.num_rows_1,
        work.partials,
        work.sums,
        sinks_H,
        out_THD,
        *out_THD.stride()[:2],
        HEADS=limits.num_heads,
        HEAD_DIM=limits.head_dim,
        BLOCK_D=triton.next_power_of_2(limits.head_dim),
        BLOCK_H=config.block_heads,
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
def _units(
    start, length, chunk, own, window, TILE_KEYS: tl.constexpr, TASK_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The sequences' tokens from `chunk` on that fit in a task: first key, number of tiles, number of tokens."""
    tokens = tl.minimum(tl.maximum(length - chunk, 0), TASK_TOKENS)
    origin = tl.maximum(start + chunk - window + 1, 0) // TILE_KEYS * TILE_KEYS if HAS_WINDOW else own
    tiles = tl.where(tokens > 0, tl.cdiv(start + chunk + tokens - origin, TILE_KEYS), 0)
    return origin, tiles, tokens


@triton.jit
def _cut(tasks, task, part, parts, slot, origin, last, at, tiles, share, tokens, TILE_KEYS: tl.constexpr):
    """Writes a part of each unit, which begins where its bin does, or else with the unit: cuts lie at multiples of the
    share. Of the tiles laid end to end, those of a unit begin at `at`; its keys are `[origin, last)`."""
    exists = part < parts
    begin = tl.maximum((at // share + part) * share, at)
    end = tl.minimum((at // share + part + 1) * share, at + tiles)
    word = tasks + (task + part) * 4
    tl.store(word, slot, mask=exists)
    tl.store(word + 1, origin + (begin - at) * TILE_KEYS, mask=exists)
    tl.store(word + 2, tl.minimum(origin + (end - at) * TILE_KEYS, last), mask=exists)
    tl.store(word + 3, tokens, mask=exists)


@triton.jit
def _begin(bins, task, part, parts, at, share):
    """Of each unit, writes to the bins that begin with this part of it which task that is."""
    number = at // share + part
    tl.store(bins + number, task + part, mask=(part < parts) & (number * share >= at))


@triton.jit
def _enter(entries, task, place, row, position, partial, present, TASK_TOKENS: tl.constexpr):
    """Writes the entry of one row in each task."""
    entry = entries + (task * TASK_TOKENS + place) * 3
    tl.store(entry, row, mask=present)
    tl.store(entry + 1, position, mask=present)
    tl.store(entry + 2, partial, mask=present)


@triton.jit
def _shared_tiles(units, num_units, BLOCK_U: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Tiles of all shared units."""
    u = tl.arange(0, BLOCK_U)
    is_unit = u < tl.load(num_units)
    begin, end = tl.load(units + u * 4 + 1, mask=is_unit, other=0), tl.load(units + u * 4 + 2, mask=is_unit, other=0)
    return tl.sum(tl.cdiv(end - begin, TILE_KEYS))


@triton.jit
def _cut_shared(
    units, num_units, tasks, bins, shared_parts, total, share, num_bins, BLOCK_U: tl.constexpr, TILE_KEYS: tl.constexpr
):
    """Writes the tasks of shared units and the bins that begin with them, and of each its first task and their number.

    Returns the share of the bins that are left, the number of bins that are full, and the tiles behind those, and all
    tasks, so far. A long unit has bins of its own, up to half as long again as others: those of one span then walk its
    keys side by side and find them in the cache. Measured on an H200: 256 sequences over 8192 shared keys and 256 of
    their own take 173 us instead of 192 with bins of equal length.
    """
    u = tl.arange(0, BLOCK_U)
    is_unit = u < tl.load(num_units)
    word = units + u * 4
    slot, begin = tl.load(word, mask=is_unit, other=0), tl.load(word + 1, mask=is_unit, other=0)
    end, tokens = tl.load(word + 2, mask=is_unit, other=0), tl.load(word + 3, mask=is_unit, other=0)
    tiles = tl.cdiv(end - begin, TILE_KEYS)
    whole = tl.where(tiles >= share, tl.cdiv(tiles, share + share // 2), 0)
    whole = tl.where(tl.sum(whole) < num_bins, whole, 0)
    length = tl.maximum(tl.cdiv(tiles, tl.maximum(whole, 1)), 1)
    whole = tl.where(whole > 0, tl.cdiv(tiles, length), 0)
    num_whole = tl.sum(whole)
    whole_task = tl.cumsum(whole) - whole
    for part in range(tl.max(whole)):
        _cut(tasks, whole_task, part, whole, slot, begin, end, 0, tiles, length, tokens, TILE_KEYS)
        tl.store(bins + whole_task + part, whole_task + part, mask=part < whole)
    share = tl.maximum(tl.cdiv(total - tl.sum(tl.where(whole > 0, tiles, 0)), num_bins - num_whole), 1)
    tiles = tl.where(whole > 0, 0, tiles)
    at = tl.cumsum(tiles) - tiles
    parts = tl.where(tiles > 0, (at + tiles - 1) // share - at // share + 1, 0)
    task = num_whole + tl.cumsum(parts) - parts
    for part in range(tl.max(parts)):
        _cut(tasks, task, part, parts, slot, begin, end, at, tiles, share, tokens, TILE_KEYS)
        _begin(bins + num_whole, task, part, parts, at, share)
    tl.store(shared_parts + u * 2, tl.where(whole > 0, whole_task, task), mask=is_unit)
    tl.store(shared_parts + u * 2 + 1, whole + parts, mask=is_unit)
    tl.debug_barrier()  # other threads read them
    return share, num_whole, tl.sum(tiles), num_whole + tl.sum(parts)


@triton.jit
def _enter_shared(
    entries, paths, shared_parts, path_stride, has_path, first, low, tokens, most, partial, all_parts,
    BLOCK_B: tl.constexpr, TASK_TOKENS: tl.constexpr, DEPTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Writes the entries of each sequence's rows, the first of them `first`, in the tasks of its path."""
    b = tl.arange(0, BLOCK_B)
    done = tl.zeros([BLOCK_B], tl.int32)
    for depth in tl.static_range(DEPTH):
        word = tl.load(paths + depth * path_stride + b, mask=has_path, other=-1)
        task = tl.load(shared_parts + word // PLACES * 2, mask=word >= 0, other=0)
        parts = tl.load(shared_parts + word // PLACES * 2 + 1, mask=word >= 0, other=0)
        for part in range(tl.max(parts)):
            for index in range(most):
                result = partial + index * all_parts + done + part
                present = (part < parts) & (index < tokens)
                _enter(
                    entries,
                    task + part,
                    word % PLACES + index,
                    first + index,
                    low + index,
                    result,
                    present,
                    TASK_TOKENS,
                )
        done += parts


@triton.jit(do_not_specialize=["max_row_tokens", "window", "num_bins", "capacity", "path_stride"])
def _plan(
    slots,
    starts,
    lengths,
    firsts,
    num_sequences,
    units,
    paths,
    num_units,
    bins,
    tasks,
    entries,
    rows,
    num_rows,
    shared_parts,
    max_row_tokens,
    window,
    num_bins,
    capacity,
    path_stride,
    TILE_KEYS: tl.constexpr,
    TASK_TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_BINS: tl.constexpr,
    DEPTH: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    b = tl.arange(0, BLOCK_B)
    count = tl.load(num_sequences)
    slot = tl.load(slots + b, mask=b < capacity, other=0)
    start = tl.load(starts + b, mask=b < capacity, other=0)
    length = tl.load(lengths + b, mask=b < capacity, other=0)
    first = tl.load(firsts + b, mask=b < capacity, other=0)
    length = tl.where((b < tl.minimum(count, capacity)) & (length <= max_row_tokens), length, 0)
    own = tl.zeros([BLOCK_B], tl.int32)  # the first key that a sequence reads for itself
    total = 0
    if BLOCK_U > 0:
        has_path = (length > 0) & (tl.load(num_units) > 0)
        total += _shared_tiles(units, num_units, BLOCK_U, TILE_KEYS)
        for depth in tl.static_range(DEPTH):
            word = tl.load(paths + depth * path_stride + b, mask=has_path, other=-1)
            own = tl.maximum(own, tl.load(units + word // PLACES * 4 + 2, mask=word >= 0, other=0))
    for chunk in range(0, max_row_tokens, TASK_TOKENS):
        origin, tiles, tokens = _units(start, length, chunk, own, window, TILE_KEYS, TASK_TOKENS, HAS_WINDOW)
        total += tl.sum(tiles)
    share = tl.maximum(tl.cdiv(total, num_bins), 1)
    whole_bins = 0
    past_tiles = 0
    past_tasks = 0
    past_rows = 0
    past_partials = 0
    before = tl.zeros([BLOCK_B], tl.int32)  # parts of a sequence's path
    if BLOCK_U > 0:
        share, whole_bins, past_tiles, past_tasks = _cut_shared(
            units, num_units, tasks, bins, shared_parts, total, share, num_bins, BLOCK_U, TILE_KEYS
        )
        for depth in tl.static_range(DEPTH):
            word = tl.load(paths + depth * path_stride + b, mask=has_path, other=-1)
            before += tl.load(shared_parts + word // PLACES * 2 + 1, mask=word >= 0, other=0)
        bins += whole_bins
    for chunk in range(0, max_row_tokens, TASK_TOKENS):
        origin, tiles, tokens = _units(start, length, chunk, own, window, TILE_KEYS, TASK_TOKENS, HAS_WINDOW)
        at = past_tiles + tl.cumsum(tiles) - tiles
        parts = tl.where(tokens > 0, (at + tiles - 1) // share - at // share + 1, 0)
        task = past_tasks + tl.cumsum(parts) - parts
        all_parts = parts + before
        merged = tl.where(all_parts > 1, tokens, 0)
        row = past_rows + tl.cumsum(merged) - merged
        partial = past_partials + tl.cumsum(merged * all_parts) - merged * all_parts
        low = start + chunk
        most = tl.minimum(max_row_tokens, TASK_TOKENS)
        for part in range(tl.max(parts)):
            _cut(tasks, task, part, parts, slot, origin, low + tokens, at, tiles, share, tokens, TILE_KEYS)
            _begin(bins, task, part, parts, at, share)
            for index in range(most):
                result = tl.where(all_parts > 1, partial + index * all_parts + before + part, -1)
                present = (part < parts) & (index < tokens)
                _enter(entries, task + part, index, first + chunk + index, low + index, result, present, TASK_TOKENS)
        if BLOCK_U > 0:
            _enter_shared(
                entries, paths, shared_parts, path_stride, has_path, first + chunk, low, tokens, most,
                partial, all_parts, BLOCK_B, TASK_TOKENS, DEPTH, PLACES,
            )  # fmt: skip
        for index in range(most):
            listed = rows + (row + index) * 3
            tl.store(listed, first + chunk + index, mask=index < merged)
            tl.store(listed + 1, partial + index * all_parts, mask=index < merged)
            tl.store(listed + 2, all_parts, mask=index < merged)
        past_tiles += tl.sum(tiles)
        past_tasks += tl.sum(parts)
        past_rows += tl.sum(merged)
        past_partials += tl.sum(merged * all_parts)
    j = tl.arange(0, BLOCK_BINS)
    tl.store(bins + j, past_tasks + j * 0, mask=(j >= tl.cdiv(past_tiles, share)) & (j <= num_bins - whole_bins))
    tl.store(num_rows, past_rows)


@triton.jit
def _pages(table, position, n, last, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Page ids of the tile at `position`: one where a page holds it all, else one a key. Never past position `last`."""
    if PAGE < KEYS:
        position = position + n
    return tl.load(table + tl.minimum(position, last) // PAGE).to(tl.int64)


@triton.jit
def _task(tasks, entries, index, r, GROUP: tl.constexpr, TOKENS: tl.constexpr):
    """A task's slot, begin, end, number of entries, and for each of its rows the query row, position, partial."""
    word = tasks + index * 4
    entry = entries + (index * TOKENS + tl.minimum(r // GROUP, TOKENS - 1)) * 3
    slot, begin, end, count = tl.load(word), tl.load(word + 1), tl.load(word + 2), tl.load(word + 3)
    return slot, begin, end, count, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _queries(query, row, head, d, is_number, row_stride, head_stride):
    place = row.to(tl.int64) * row_stride + head * head_stride
    return tl.load(query + place[:, None] + d[None, :], mask=is_number, other=0.0)


@triton.jit
def _weigh(scores, is_seen, largest, unit, softcap, HAS_SOFTCAP: tl.constexpr):
    """Powers of two of the scores that are seen, below the largest so far, and that."""
    if HAS_SOFTCAP:
        scores = softcap * LOG2_E * (1 - 2 / (1 + tl.exp2(scores * unit)))  # tanh
        scores = tl.where(is_seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
    else:  # scaled here, where it is one multiply-add with the subtraction
        scores = tl.where(is_seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1) * unit)
        weights = tl.exp2(scores * unit - larger[:, None])
    return weights, larger


@triton.jit
def _store(
    out, partials, sums, sinks, place, result, head, d, largest, total, mixed, is_row, is_number, HEAD_DIM: tl.constexpr
):
    """Writes what a task found: for rows with other tasks to the partial results, for the others to the output."""
    logs = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
    tl.store(sums + result, logs, mask=is_row & (result >= 0))
    if sinks is not None:
        anchor = tl.where(total > 0, largest, 0.0)
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += tl.where(result < 0, tl.exp2(sink - anchor), 0.0)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(partials + result[:, None] * HEAD_DIM + d[None, :], mixed, mask=is_number & (result >= 0)[:, None])
    tl.store(out + place[:, None] + d[None, :], mixed.to(out.dtype.element_ty), mask=is_number & (result < 0)[:, None])


@triton.jit(do_not_specialize=["window", "table_stride"])
def _attend(
    query,
    keys,
    values,
    key_boxes,
    value_boxes,
    page_table,
    bins,
    tasks,
    entries,
    partials,
    sums,
    sinks,
    out,
    scale,
    softcap,
    window,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_BOXES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    share = bins + tl.program_id(1)
    first_task, last_task = tl.load(share), tl.load(share + 1) - 1
    if first_task > last_task:
        if PDL:  # were no program to wait, the next kernel might begin before the one before this has ended
            gdc_wait()
        return
    r, n, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + r % GROUP
    is_real = (d < HEAD_DIM)[None, :] if BLOCK_D != HEAD_DIM else None
    zero = 0.0 if BLOCK_D != HEAD_DIM else None
    unit = scale * LOG2_E  # scores count in powers of two
    if HAS_SOFTCAP:
        unit *= 2 / softcap
    slot, begin, end, count, row, position, partial = _task(tasks, entries, first_task, r, GROUP, ROWS // GROUP)
    table = page_table + slot.to(tl.int64) * table_stride
    page = _pages(table, begin, n, end - 1, PAGE, KEYS)
    if PDL:
        gdc_wait()
    is_number = (r < count * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = _queries(query, row, head, d, is_number, query_stride, query_head_stride)
    # Of a task, the words are read before the task before it is computed, and the query before that is written.
    for task in tl.range(first_task, last_task + 1):
        is_row = r < count * GROUP
        is_number = is_row[:, None] & (d < HEAD_DIM)[None, :]
        place = row.to(tl.int64) * out_stride + head * out_head_stride
        result = tl.where(partial < 0, -1, partial * HEADS + head)
        last = tl.where(is_row, tl.minimum(position, end - 1), -1)
        earliest = position - window
        largest = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, BLOCK_D], tl.float32)
        slot, next_begin, next_end, count, row, position, partial = _task(
            tasks, entries, tl.minimum(task + 1, last_task), r, GROUP, ROWS // GROUP
        )
        for at in tl.range(begin, end, KEYS):
            # The next page's id is carried along: a load of it that this step's loads wait for halves the pipeline.
            current = page
            page = _pages(table, at + KEYS, n, end - 1, PAGE, KEYS)
            # Unwritten memory may hold NaN, which no weight of zero takes back. A box ends with the last key, and what
            # it holds before its page is zeros. Of single rows, those past the end are the last one again.
            if HAS_BOXES:
                first = tl.minimum(at, end - KEYS)
                key = tl.where(first + n >= at, first + n, NEVER)
                token = first - at // PAGE * PAGE
                k = key_boxes.load([current.to(tl.int32), token, kv_head * HEAD_DIM]).reshape(KEYS, HEAD_DIM)
            else:
                key = at + n
                base = current * page_stride + kv_head * HEAD_DIM
                token = tl.minimum(n, end - 1 - at)
                if PAGE < KEYS:
                    base = base[:, None]
                    token = (token + at) & (PAGE - 1)
                if PAGE > KEYS:
                    base += at % PAGE * (HEADS // GROUP * HEAD_DIM)
                where = token[:, None] * (HEADS // GROUP * HEAD_DIM) + d[None, :]
                k = tl.load(keys + base + where, mask=is_real, other=zero)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            is_seen = key[None, :] <= last[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (key[None, :] > earliest[:, None])
            weights, larger = _weigh(scores, is_seen, largest, unit, softcap, HAS_SOFTCAP)
            decay = tl.exp2(largest - larger)
            total = total * decay + tl.sum(weights, 1)
            if HAS_BOXES:
                v = value_boxes.load([current.to(tl.int32), token, kv_head * HEAD_DIM]).reshape(KEYS, HEAD_DIM)
            else:
                v = tl.load(values + base + where, mask=is_real, other=zero)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * decay[:, None], input_precision="ieee")
            largest = larger
        if PDL:  # noqa: SIM102 (a constant and a number of the device cannot be one condition)
            if task == last_task:
                gdc_launch_dependents()
        begin, end = next_begin, next_end
        table = page_table + slot.to(tl.int64) * table_stride
        page = _pages(table, begin, n, end - 1, PAGE, KEYS)
        is_next = (r < count * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
        q = _queries(query, row, head, d, is_next, query_stride, query_head_stride)
        _store(out, partials, sums, sinks, place, result, head, d, largest, total, mixed, is_row, is_number, HEAD_DIM)


@triton.jit
def _merge(
    rows,
    num_rows,
    partials,
    sums,
    sinks,
    out,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(1)
    count = tl.load(num_rows)
    row, first = tl.load(rows + index * 3).to(tl.int64), tl.load(rows + index * 3 + 1)
    num_splits = tl.load(rows + index * 3 + 2)
    if index >= count:
        if PDL:
            gdc_wait()
        return
    s, h, d = tl.arange(0, SPLITS), tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head = h < HEADS
    is_number = is_head[:, None] & (d < HEAD_DIM)[None, :]
    largest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + h, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total = tl.where(largest > -float("inf"), 1.0, 0.0)
    if PDL:
        gdc_wait()
    mixed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for base in tl.range(0, num_splits, SPLITS):
        exists = base + s < num_splits
        result = (first + base + s)[:, None] * HEADS + h[None, :]
        logs = tl.load(sums + result, mask=exists[:, None] & is_head[None, :], other=-float("inf"))
        parts = tl.load(
            partials + result[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=exists[:, None, None] & is_number[None, :, :],
            other=0.0,
        )
        larger = tl.maximum(largest, tl.max(logs, 0))
        anchor = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(logs - anchor[None, :])
        decay = tl.exp2(largest - anchor)
        total = total * decay + tl.sum(weights, 0)
        mixed = mixed * decay[:, None] + tl.sum(parts * weights[:, :, None], 0)
        largest = larger
    if PDL:
        gdc_launch_dependents()
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    place = row * out_stride + h[:, None] * out_head_stride + d[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=is_number)
