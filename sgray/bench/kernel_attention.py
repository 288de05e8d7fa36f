"""Attention kernels on paged keys and values, beside torch's own on contiguous ones of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from sgray.bench.kernel_rig import Rig, Row, Sizes, largest_error, num_sets
from sgray.bench.stopwatch import Call
from sgray.kernels.batch import MAX_DEPTH, BatchTables, SharedTables
from sgray.kernels.boxes import boxes_of
from sgray.kernels.extend_attention import kernel as extend
from sgray.kernels.extend_attention import reference as extend_reference
from sgray.kernels.launch import features
from sgray.kernels.span_attention import kernel as span
from sgray.kernels.span_attention import reference as span_reference
from sgray.kernels.span_attention.sharing import SharedUnits, Spans, share
from sgray.kernels.span_attention.work import SpanLimits, SpanWork
from sgray.layers.backends.kernel_attention import MIXED_ROWS
from sgray.memory.pool import KVPool, PoolShape

SHARED_ROWS = (16, 32, 64)
GOOD_TFLOP_S = 600.0  # what the best attention kernels reach on long extends on Hopper
GARBAGE = 2**30  # a page id that nobody may follow
PEERS = {"cuDNN us": SDPBackend.CUDNN_ATTENTION, "flash us": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step: sequence b has `starts[b]` tokens in memory and computes `news[b]`. Pages lie in no order."""

    starts: Sequence[int]
    news: Sequence[int]
    pool: KVPool
    page_table: Tensor
    batch: BatchTables
    query: Tensor
    out: Tensor

    @classmethod
    def build(cls, rig: Rig, starts: Sequence[int], news: Sequence[int], spans: Spans = ()) -> PagedStep:
        """Random keys and values in enough layers that reading one after the other misses the L2 cache."""
        sizes = rig.sizes
        needs = [-(-(start + new) // sizes.page_size) for start, new in zip(starts, news, strict=True)]
        rows = _page_rows(needs, spans, sizes.page_size)
        num_pages = 1 + max(page for row in rows for page in row)
        layer_bytes = kv_bytes(sizes, num_pages * sizes.page_size)
        shape = PoolShape(num_sets(layer_bytes), sizes.page_size, sizes.num_kv_heads, sizes.head_dim, torch.bfloat16)
        pool = KVPool(num_pages, shape, rig.device)
        pool.pages.normal_()
        ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        rows = [[ids[page] for page in row] + [GARBAGE] * (max(needs) - len(row)) for row in rows]
        num_tokens = sum(news)
        query = rig.random(num_tokens, sizes.num_heads, sizes.head_dim)
        batch = _batch(rig, starts, news)
        return cls(starts, news, pool, rig.integers(rows), batch, query, rig.empty(*query.shape))

    @property
    def longest(self) -> int:
        return max(start + new for start, new in zip(self.starts, self.news, strict=True))

    def poison(self) -> None:
        """NaN into everything that no row may see: tokens past each sequence's last."""
        for row, (start, new) in enumerate(zip(self.starts, self.news, strict=True)):
            size = self.pool.shape.page_size
            used = (start + new) % size
            if used:
                page = int(self.page_table[row, (start + new) // size])
                self.pool.pages[page, :, :, used:] = torch.nan


def _page_rows(needs: Sequence[int], spans: Spans, page_size: int) -> list[list[int]]:
    """Pages of every sequence, counted through; those of a span are the first reader's for all."""
    rows: list[list[int]] = []
    homes = {index: (begin, end, members[0]) for begin, end, members in spans for index in members[1:]}
    num_pages = 0
    for index, need in enumerate(needs):
        begin, end, home = homes.get(index, (0, 0, index))
        row = [*range(num_pages, num_pages + need - (end - begin) // page_size)]
        num_pages += len(row)
        first = begin // page_size
        rows.append([*row[:first], *(rows[home][first : end // page_size] if end else ()), *row[first:]])
    return rows


def _batch(rig: Rig, starts: Sequence[int], news: Sequence[int]) -> BatchTables:
    firsts = [sum(news[:index]) for index in range(len(news))]
    return BatchTables(
        slots_B=rig.integers(range(len(news))),
        starts_B=rig.integers(starts),
        lengths_B=rig.integers(news),
        firsts_B=rig.integers(firsts),
        num_sequences_1=rig.integers([len(news)]),
        num_tokens_1=rig.integers([sum(news)]),
    )


def kv_bytes(sizes: Sizes, num_tokens: int) -> int:
    """Keys and values of one layer."""
    return num_tokens * 2 * sizes.num_kv_heads * sizes.head_dim * torch.bfloat16.itemsize


def attention_flops(sizes: Sizes, num_sequences: int, before: int, new: int) -> float:
    """Multiplications and additions of causal attention; a triangle counts half of its square."""
    return 4 * num_sequences * sizes.num_heads * sizes.head_dim * (new * before + new * new / 2)


def decode(rig: Rig) -> list[Row]:
    """One new token a sequence."""
    return [_decode_row(rig, name, lengths) for name, lengths in rig.sizes.decode]


def _decode_row(rig: Rig, name: str, lengths: Sequence[int]) -> Row:
    sizes = rig.sizes
    step = PagedStep.build(rig, [length - 1 for length in lengths], [1] * len(lengths))
    work = _span_work(rig, step)
    plan_us = rig.stopwatch.microseconds([_span_plan(step, work)])
    us = rig.stopwatch.microseconds(_span_calls(rig, step, work))
    num_bytes = kv_bytes(sizes, sum(lengths)) + 2 * step.query.nbytes
    row: Row = {"case": name, "us": us, "% of read": rig.share(num_bytes, us), "plan us": plan_us}
    is_even = len(set(lengths)) == 1
    del step, work
    calls = _contiguous_calls(rig, len(lengths), lengths[0] - 1, 1) if is_even else []
    return row | {peer: rig.sdpa(backend, calls) if calls else None for peer, backend in PEERS.items()}


def shared(rig: Rig) -> list[Row]:
    """One new token a sequence, after tokens that groups of sequences have in the same pages."""
    return [_shared_row(rig, *case) for case in rig.sizes.shared]


def _shared_row(rig: Rig, name: str, num_groups: int, group_size: int, prefix: int, own: int) -> Row:
    sizes, num_sequences = rig.sizes, num_groups * group_size
    spans = [(0, prefix, list(range(group * group_size, (group + 1) * group_size))) for group in range(num_groups)]
    step = PagedStep.build(rig, [prefix + own - 1] * num_sequences, [1] * num_sequences, spans)
    each_us = rig.stopwatch.microseconds(_planned(rig, step, _span_work(rig, step)))
    once: Row = {}
    for rows in SHARED_ROWS:
        work = _span_work(rig, step, rows, max_shared=2 * num_sequences)
        units = _units(step, spans, work)
        shared_step = replace(step, batch=replace(step.batch, shared=_shared_tables(rig, units, num_sequences)))
        us = rig.stopwatch.microseconds(_planned(rig, shared_step, work))
        once |= {"us" if rows == MIXED_ROWS else f"us, {rows} rows": us}
    plan_us = rig.stopwatch.microseconds([_span_plan(shared_step, work)])
    num_bytes = kv_bytes(sizes, num_groups * prefix + num_sequences * own) + 2 * step.query.nbytes
    row: Row = {"case": name, "each us": each_us, **once, "% of read": rig.share(num_bytes, once["us"])}
    return row | {"plan us": plan_us, "pays": units.pays(step.starts)}


def _units(step: PagedStep, spans: Spans, work: SpanWork) -> SharedUnits:
    sizes = {"max_units": len(step.news), "max_read": work.limits.max_shared}
    return share(spans, range(len(step.news)), step.news, tokens_per_task=work.limits.tokens_per_task, **sizes)


def _shared_tables(rig: Rig, found: SharedUnits, num_sequences: int) -> SharedTables:
    units = np.zeros((num_sequences, 4), dtype=np.int32)
    paths = np.zeros((MAX_DEPTH, num_sequences), dtype=np.int32)
    found.write(units, paths)
    return SharedTables(rig.integers(units.tolist()), rig.integers(paths.tolist()), rig.integers([len(found.units)]))


def _planned(rig: Rig, step: PagedStep, work: SpanWork) -> list[Call]:
    """One call a layer, after the step's plan."""
    _span_plan(step, work)()
    return _span_calls(rig, step, work)


def _span_work(rig: Rig, step: PagedStep, rows: int = 16, max_shared: int = 0) -> SpanWork:
    sizes = rig.sizes
    limits = SpanLimits(
        max_sequences=len(step.news),
        max_tokens=len(step.news),
        max_length=step.longest,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        page_size=sizes.page_size,
        rows_per_task=rows,
        num_sms=features(rig.device).num_sms,
        max_shared=max_shared,
    )
    return SpanWork.allocate(limits, rig.device)


def _span_plan(step: PagedStep, work: SpanWork) -> Call:
    return partial(span.plan_spans, work, step.batch, max_row_tokens=1, window=None)


def _span_calls(rig: Rig, step: PagedStep, work: SpanWork) -> list[Call]:
    """One call a layer."""
    return [
        partial(
            span.attend_spans,
            step.query,
            keys,
            values,
            step.page_table,
            work,
            step.out,
            scale=rig.sizes.head_dim**-0.5,
            boxes=boxes_of(keys, values),
            pdl=rig.pdl,
        )
        for keys, values in step.pool.layers
    ]


def extends(rig: Rig) -> list[Row]:
    """Many new tokens a sequence, from the first on and after a cached prefix."""
    return [_extend_row(rig, *case) for case in rig.sizes.extend]


def _extend_row(rig: Rig, name: str, num_sequences: int, before: int, new: int) -> Row:
    step = PagedStep.build(rig, [before] * num_sequences, [new] * num_sequences)
    us = rig.stopwatch.microseconds(_extend_calls(rig, step))
    del step
    calls = _contiguous_calls(rig, num_sequences, before, new)
    flops = attention_flops(rig.sizes, num_sequences, before, new)
    row: Row = {"case": name, "us": us, "TFLOP/s": flops / us / 1e6}
    for peer, backend in PEERS.items():
        peer_us = rig.sdpa(backend, calls)
        row[peer] = peer_us
        row[peer.replace("us", "TFLOP/s")] = None if peer_us is None else flops / peer_us / 1e6
    return row


def shared_extends(rig: Rig) -> list[Row]:
    """Extends read a shared prefix once a sequence: what that costs beside prefixes that nobody shares.

    "once" is the time that products of this size take at 600 TFLOP/s, or that reading each page once takes.
    """
    return [_shared_extend_row(rig, *case) for case in rig.sizes.extend_shared]


def _shared_extend_row(rig: Rig, name: str, num_sequences: int, before: int, new: int) -> Row:
    found: dict[str, float] = {}
    for column, spans in (("own pages us", []), ("us", [(0, before, list(range(num_sequences)))])):
        step = PagedStep.build(rig, [before] * num_sequences, [new] * num_sequences, spans)
        found[column] = rig.stopwatch.microseconds(_extend_calls(rig, step))
        del step
    flops = attention_flops(rig.sizes, num_sequences, before, new)
    read_us = kv_bytes(rig.sizes, before + num_sequences * new) / rig.read_gb_s / 1e3
    once_us = max(flops / GOOD_TFLOP_S / 1e6, read_us)
    return {"case": name, **found, "TFLOP/s": flops / found["us"] / 1e6, "once us": once_us}


def _extend_calls(rig: Rig, step: PagedStep) -> list[Call]:
    """One call a layer, after the step's plan."""
    sizes = rig.sizes
    layers = [extend.ExtendPages.of(keys, values) for keys, values in step.pool.layers]
    work = extend.ExtendWork.allocate(
        max_sequences=len(step.news),
        max_tokens=sum(step.news),
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        device=rig.device,
        large_from=layers[0].large_from,
    )
    plan = extend.plan_extends(work, step.batch, min_length=1, longest=step.longest)
    return [
        partial(
            extend.attend_extends,
            step.query,
            pages,
            step.page_table,
            plan,
            step.out,
            scale=sizes.head_dim**-0.5,
            pdl=rig.pdl,
        )
        for pages in layers
    ]


def _contiguous_calls(rig: Rig, num_sequences: int, before: int, new: int) -> list[Call]:
    """torch's attention of the same size, each call on keys and values of its own."""
    sizes, length = rig.sizes, before + new
    query = rig.random(num_sequences, sizes.num_heads, new, sizes.head_dim)
    sides = rig.sets(
        lambda: rig.random(2, num_sequences, sizes.num_kv_heads, length, sizes.head_dim),
        kv_bytes(sizes, num_sequences * length),
    )
    from torch.nn.attention.bias import causal_lower_right  # writes into the environment when it is imported

    mask = causal_lower_right(new, length) if before and new > 1 else None
    return [
        partial(
            F.scaled_dot_product_attention,
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and new > 1,
            enable_gqa=True,
        )
        for keys, values in sides
    ]


def check_span(rig: Rig) -> float:
    """Lengths on both sides of a page's edge, of one key, and long enough to be cut; NaN wherever nobody may look."""
    page = rig.sizes.page_size
    step = PagedStep.build(rig, [0, page - 1, page, 5 * page + 3], [1, 1, 1, 1])
    step.poison()
    work = _span_work(rig, step)
    _span_plan(step, work)()
    _span_calls(rig, step, work)[0]()
    expected = torch.empty_like(step.out)
    keys, values = step.pool.layers[0]
    span_reference.attend_spans(
        step.query, keys, values, step.page_table, work, expected, scale=rig.sizes.head_dim**-0.5
    )
    return largest_error(step.out, expected)


def check_shared(rig: Rig) -> float:
    """Nested spans, one of them read by more sequences than a task takes, against what each reads for itself."""
    page = rig.sizes.page_size
    starts = [5 * page + 3 + index for index in range(18)]
    spans = [(0, 2 * page, list(range(18))), (2 * page, 4 * page, list(range(5)))]
    step = PagedStep.build(rig, starts, [1] * 18, [spans[0]])
    work = _span_work(rig, step, 64, max_shared=64)
    step.page_table[:5, 2:4] = step.page_table[0, 2:4]
    _planned(rig, step, work)[0]()
    expected = step.out.clone()
    batch = replace(step.batch, shared=_shared_tables(rig, _units(step, spans, work), 18))
    step.out.fill_(torch.nan)
    _planned(rig, replace(step, batch=batch), work)[0]()
    return largest_error(step.out, expected)


def check_extend(rig: Rig) -> float:
    """A short and a long extend, one after cached tokens; NaN wherever nobody may look."""
    page = rig.sizes.page_size
    starts, news = [0, page + 5, 0], [3, page, 2 * page + 1]
    step = PagedStep.build(rig, starts, news)
    step.poison()
    _extend_calls(rig, step)[0]()
    sizes = rig.sizes
    work = extend_reference.ExtendWork.allocate(
        max_sequences=len(news),
        max_tokens=sum(news),
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        device=rig.device,
    )
    plan = extend_reference.plan_extends(work, step.batch, min_length=1, longest=step.longest)
    expected = torch.empty_like(step.out)
    pages = extend_reference.ExtendPages.of(*step.pool.layers[0])
    extend_reference.attend_extends(step.query, pages, step.page_table, plan, expected, scale=sizes.head_dim**-0.5)
    return largest_error(step.out, expected)
