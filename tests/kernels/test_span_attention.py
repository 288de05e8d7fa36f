"""Span attention against its reference, the reference against the dense formula, and what must not change a result."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from sgray.kernels.batch import MAX_DEPTH, BatchTables, SharedTables
from sgray.kernels.boxes import boxes_of
from sgray.kernels.span_attention import kernel, reference
from sgray.kernels.span_attention.sharing import SharedUnits, share
from sgray.kernels.span_attention.work import SpanLimits, SpanWork

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class Case:
    """A step: `sequences` are (tokens computed before, tokens of this step). Everything else is a size or a rule."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 64
    rows: int = 16
    num_sms: int = 4
    max_row_tokens: int = 1
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: float | None = None  # the mean of random ones
    seed: int = 0
    shared: tuple[tuple[int, int, tuple[int, ...]], ...] = ()  # begin, end, sequences


@dataclass(frozen=True)
class Step:
    """The tensors of a case. All that nobody wrote is NaN, or a page id that does not exist."""

    batch: BatchTables
    query: Tensor
    keys: Tensor
    values: Tensor
    page_table: Tensor
    sinks: Tensor | None
    work: SpanWork


def limits_of(case: Case) -> SpanLimits:
    planned = [length for _, length in case.sequences if length <= case.max_row_tokens]
    return SpanLimits(
        max_sequences=len(case.sequences) + 1,
        max_tokens=max(sum(planned), 1),
        max_length=max((sum(sequence) for sequence in case.sequences), default=1),
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        rows_per_task=case.rows,
        num_sms=case.num_sms,
        max_shared=4 * max(sum(planned), 1) if case.shared else 0,
    )


def units_of(case: Case) -> SharedUnits:
    """What a host makes of the case's shared spans."""
    slots, lengths = [2 * b + 1 for b in range(len(case.sequences))], [length for _, length in case.sequences]
    limits = limits_of(case)
    sizes = {"max_units": limits.max_shared, "max_read": limits.max_shared}
    planned = [
        (begin, end, [b for b in members if lengths[b] <= case.max_row_tokens]) for begin, end, members in case.shared
    ]
    return share(planned, slots, lengths, tokens_per_task=limits.tokens_per_task, **sizes)


def shared_tables(case: Case, device: torch.device) -> SharedTables | None:
    if not case.shared:
        return None
    found = units_of(case)
    units = np.full((limits_of(case).max_shared, 4), 10**6, dtype=np.int32)
    paths = np.full((MAX_DEPTH, len(case.sequences) + 1), 10**6, dtype=np.int32)
    found.write(units, paths)
    count = torch.tensor([len(found.units)], dtype=torch.int32, device=device)
    return SharedTables(torch.from_numpy(units).to(device), torch.from_numpy(paths).to(device), count)


def tables(case: Case, device: torch.device) -> BatchTables:
    """Slot 2 * b + 1 for sequence b, rows in order, and a garbage entry at the end."""
    starts = [start for start, _ in case.sequences]
    lengths = [length for _, length in case.sequences]
    firsts = [sum(lengths[:b]) for b in range(len(lengths))]
    columns = ([2 * b + 1 for b in range(len(starts))], starts, lengths, firsts)
    tensors = [torch.tensor([*column, 10**6], dtype=torch.int32, device=device) for column in columns]
    counts = [torch.tensor([n], dtype=torch.int32, device=device) for n in (len(starts), sum(lengths))]
    return BatchTables(*tensors, *counts, shared=shared_tables(case, device))


def make(case: Case, device: torch.device) -> Step:
    generator = torch.Generator().manual_seed(case.seed)
    counts = [-(-sum(sequence) // case.page_size) for sequence in case.sequences]
    num_pages = sum(counts) + 1
    pool = torch.full((num_pages, 2, 2, case.page_size, case.kv_heads, case.head_dim), NAN, dtype=case.dtype)
    table = torch.full((2 * len(counts) + 2, max(counts, default=0) + 2), 10**6, dtype=torch.int32)
    free = torch.randperm(num_pages, generator=generator).tolist()
    for b, (start, length) in enumerate(case.sequences):
        written = torch.randn(start + length, 2, case.kv_heads, case.head_dim, generator=generator).to(case.dtype)
        for index in range(counts[b]):
            page = free.pop()
            table[2 * b + 1, index] = page
            tokens = written[index * case.page_size :][: case.page_size]
            pool[page, 1, :, : len(tokens)] = tokens.transpose(0, 1)
    for begin, end, members in case.shared:
        for b in members:
            places = slice(begin // case.page_size, end // case.page_size)
            table[2 * b + 1, places] = table[2 * members[0] + 1, places]
    num_tokens = sum(length for _, length in case.sequences)
    # The query is a part of a wider product, as in a model; the row after the last is padding.
    product = torch.full((num_tokens + 1, case.heads + 2 * case.kv_heads, case.head_dim), NAN, dtype=case.dtype)
    product[:num_tokens] = torch.randn(num_tokens, *product.shape[1:], generator=generator)
    sinks = None if case.sinks is None else torch.randn(case.heads, generator=generator) + case.sinks
    pool = pool.to(device)
    return Step(
        batch=tables(case, device),
        query=product.to(device)[:, : case.heads],
        keys=pool[:, 1, 0],
        values=pool[:, 1, 1],
        page_table=table.to(device),
        sinks=None if sinks is None else sinks.to(device),
        work=poisoned(limits_of(case), device),
    )


def poisoned(limits: SpanLimits, device: torch.device) -> SpanWork:
    work = SpanWork.allocate(limits, device)
    for tensor in (work.bins, work.tasks, work.entries, work.rows, work.num_rows_1):
        tensor.fill_(10**6)
    work.partials.fill_(NAN)
    work.sums.fill_(NAN)
    return work


def attend(module: ModuleType, case: Case, step: Step) -> Tensor:
    out = torch.full_like(step.query, NAN)
    rules = {"window": case.window, "softcap": case.softcap, "sinks_H": step.sinks}
    scale = case.head_dim**-0.5
    boxes = boxes_of(step.keys, step.values)
    given = (step.query, step.keys, step.values, step.page_table, step.work, out)
    module.attend_spans(*given, scale=scale, boxes=boxes, **rules)
    return out


def run(module: ModuleType, case: Case, step: Step) -> Tensor:
    """The output, NaN where nothing was written."""
    module.plan_spans(step.work, step.batch, max_row_tokens=case.max_row_tokens, window=case.window)
    return attend(module, case, step)


def dense(case: Case, step: Step) -> Tensor:
    """The formula in float64, over keys laid side by side; NaN in the rows that are not planned."""
    out = torch.full(step.query.shape, NAN, dtype=torch.float64, device=step.query.device)
    row = 0
    for b, (start, length) in enumerate(case.sequences):
        pages = step.page_table[2 * b + 1, : -(-(start + length) // case.page_size)].long()
        sides = (side[pages].flatten(0, 1)[: start + length].double() for side in (step.keys, step.values))
        keys, values = (side.repeat_interleave(case.heads // case.kv_heads, dim=1) for side in sides)
        scores = torch.einsum("thd,lhd->htl", step.query[row : row + length].double(), keys) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(start, start + length)[:, None] - torch.arange(start + length)[None, :]
        hidden = (distance < 0) | (distance >= (case.window or math.inf))
        weights = scores.masked_fill(hidden.to(scores.device), -math.inf).exp()
        totals = weights.sum(2, keepdim=True)
        if step.sinks is not None:
            totals = totals + step.sinks.double().exp()[:, None, None]
        if length <= case.max_row_tokens:
            out[row : row + length] = torch.einsum("htl,lhd->thd", weights / totals, values)
        row += length
    return out


def check(actual: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Written where wanted and only there, and right."""
    is_wanted = ~wanted.isnan()
    assert torch.equal(~actual.isnan(), is_wanted)
    error = (actual.double() - wanted.double())[is_wanted].norm() / wanted.double()[is_wanted].norm().clamp(min=1e-30)
    assert not error > tolerance, float(error)


CASES = {
    "one short": Case(((0, 1),)),
    "ragged": Case(((0, 1), (62, 1), (63, 1), (64, 1), (140, 1)), num_sms=2),
    "one split": Case(((300, 1),), heads=2, kv_heads=1),
    "llama": Case(((150, 1), (70, 1)), heads=8, kv_heads=2, head_dim=128, num_sms=2, dtype=torch.bfloat16),
    "smollm": Case(((130, 1), (7, 1)), heads=9, kv_heads=3, head_dim=64, num_sms=3, dtype=torch.bfloat16),
    "float16": Case(((130, 1), (7, 1)), num_sms=2, dtype=torch.float16),
    "no groups": Case(((70, 1), (5, 1)), heads=3, kv_heads=3, head_dim=32, num_sms=2),
    "one group": Case(((70, 1), (5, 1)), heads=16, kv_heads=1, num_sms=2),
    "odd width": Case(((70, 1), (5, 1)), head_dim=80, num_sms=2),
    "small pages": Case(((100, 1), (47, 1), (48, 1)), page_size=16, dtype=torch.bfloat16),
    "small pages of float32": Case(((100, 1), (47, 1)), page_size=16),
    "half pages": Case(((100, 1), (31, 1)), page_size=32, dtype=torch.bfloat16),
    "large pages": Case(((100, 1), (200, 1)), page_size=128, dtype=torch.bfloat16),
    "window": Case(((300, 1), (63, 1), (64, 1), (10, 1)), window=50, num_sms=2),
    "window of one": Case(((130, 1), (64, 1)), window=1, num_sms=2),
    "softcap": Case(((70, 1), (5, 1)), softcap=0.7, num_sms=2),
    "sinks": Case(((5, 1), (200, 1)), sinks=3.0, kv_heads=1),
    "all rules": Case(
        ((100, 3), (5, 2)), num_sms=2, max_row_tokens=4, window=70, softcap=2.0, sinks=1.0, dtype=torch.bfloat16
    ),
    "short extensions": Case(((60, 3), (0, 5), (100, 20)), 4, 1, num_sms=2, max_row_tokens=5),
    "verification": Case(((61, 8), (100, 5)), 2, 1, num_sms=2, max_row_tokens=8, rows=32, page_size=16),
    "wide tasks": Case(((61, 3), (0, 33)), 2, 1, num_sms=1, max_row_tokens=33, rows=64, dtype=torch.bfloat16),
    "wide tasks in large pages": Case(
        ((61, 3), (0, 33), (130, 1), (128, 5), (191, 2)),
        2,
        1,
        num_sms=2,
        max_row_tokens=33,
        rows=64,
        page_size=128,
        dtype=torch.bfloat16,
        window=100,
    ),
    "window over chunks": Case(((90, 9), (0, 2)), 4, 1, num_sms=2, max_row_tokens=9, window=30, dtype=torch.bfloat16),
    "long ones left out": Case(((60, 2), (10, 1), (0, 5), (3, 1))),
    "shared": Case(((300, 1), (190, 1), (128, 1)), shared=((0, 128, (0, 1, 2)),)),
    "shared in small pages": Case(
        ((100, 1), (149, 1), (80, 1)), page_size=16, shared=((0, 48, (0, 1, 2)), (48, 96, (0, 1))), dtype=torch.bfloat16
    ),
    "shared by more than a task takes": Case(((100, 1),) * 9, 4, 1, shared=((0, 64, tuple(range(9))),), num_sms=2),
    "shared and nested": Case(
        ((700, 1), (500, 1), (330, 1), (300, 1), (129, 1), (70, 1), (64, 1)),
        8,
        2,
        num_sms=6,
        rows=64,
        shared=(
            (0, 64, tuple(range(7))),
            (64, 128, (0, 1, 2, 3, 4)),
            (128, 256, (0, 1, 2, 3)),
            (256, 320, (0, 1, 2)),
            (320, 448, (0, 1)),
        ),
        dtype=torch.bfloat16,
    ),
    "shared by short extensions": Case(
        ((130, 3), (128, 1), (200, 5), (128, 9)), 4, 1, rows=32, max_row_tokens=8, shared=((0, 128, (0, 1, 2, 3)),)
    ),
    "shared with sinks": Case(((130, 1), (200, 1)), 4, 1, sinks=1.0, softcap=3.0, shared=((0, 128, (0, 1)),)),
    "shared, seen through a window": Case(((130, 1), (200, 1)), window=50, shared=((0, 128, (0, 1)),)),
    "nothing to plan": Case(((60, 2),)),
    "no sequences": Case(()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_the_dense_formula(name: str, device: torch.device) -> None:
    case = CASES[name]
    step = make(case, device)
    check(run(kernel, case, step), dense(case, step), TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", CASES)
def test_the_reference_computes_the_dense_formula(name: str, device: torch.device) -> None:
    case = CASES[name]
    step = make(case, device)
    check(run(reference, case, step), dense(case, step), TOLERANCE[case.dtype])


@dataclass(frozen=True)
class Plan:
    """What a planner wrote, as far as it means anything."""

    bins: list[int]
    tasks: list[list[int]]
    entries: list[list[list[int]]]
    rows: list[list[int]]


def plans(case: Case, device: torch.device) -> tuple[Plan, Plan]:
    """What kernel and reference plan."""
    found = []
    for module in (kernel, reference):
        work = poisoned(limits_of(case), device)
        limits = work.limits
        module.plan_spans(work, tables(case, device), max_row_tokens=case.max_row_tokens, window=case.window)
        bins, num_rows = work.bins.tolist(), int(work.num_rows_1)
        assert len(bins) == limits.num_bins + 1
        assert bins[-1] <= limits.max_tasks
        assert num_rows <= limits.max_merged
        tasks = work.tasks[: bins[-1]].tolist()
        used = [entries[: task[3]] for task, entries in zip(tasks, work.entries.tolist(), strict=False)]
        assert all(entry[2] < limits.max_partials for entries in used for entry in entries)
        found.append(Plan(bins, tasks, used, work.rows[:num_rows].tolist()))
    by_kernel, by_reference = found
    return by_kernel, by_reference


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_plans_as_the_reference_does(name: str, device: torch.device) -> None:
    by_kernel, by_reference = plans(CASES[name], device)
    assert by_kernel == by_reference


@pytest.mark.parametrize("seed", range(8))
def test_random_plans_agree_and_keep_their_bounds(seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    longest = draw.choice([1, 1, 3, 20])
    sequences = tuple(
        (int(2 ** draw.uniform(0, 15)), draw.randint(1, longest + 2)) for _ in range(draw.choice([1, 5, 40]))
    )
    heads, kv_heads, rows = draw.choice([(4, 1, 16), (9, 3, 16), (32, 8, 32), (32, 8, 64)])
    case = Case(
        sequences,
        heads,
        kv_heads,
        rows=rows,
        num_sms=draw.choice([4, 33, 132]),
        max_row_tokens=longest,
        window=draw.choice([None, 1, 1000]),
    )
    by_kernel, by_reference = plans(case, device)
    assert by_kernel == by_reference


def test_a_plan_covers_every_key_of_a_row_once(device: torch.device) -> None:
    case = Case(tuple((start, 1) for start in (5, 3000, 70, 640, 9000, 130)), kv_heads=1, num_sms=4)
    plan, _ = plans(case, device)
    spans: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(6)}
    for (slot, begin, end, _), ((row, position, partial),) in zip(plan.tasks, plan.entries, strict=True):
        assert slot == 2 * row + 1
        assert position == case.sequences[row][0]
        spans[row].append((begin, end, partial))
    for row, parts in spans.items():
        assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
        assert parts[-1][1] == case.sequences[row][0] + 1
    merged = {row: list(range(first, first + count)) for row, first, count in plan.rows}
    assert 0 < len(merged) < 6
    for row, parts in spans.items():
        assert [partial for _, _, partial in parts] == merged.get(row, [-1])


@pytest.mark.parametrize("starts", [(5, 30000, 70, 640, 9000, 130), (4095,) * 20, (1000,), (9,)])
def test_bins_take_the_same_number_of_tiles_and_only_the_last_may_take_less(
    starts: tuple[int, ...], device: torch.device
) -> None:
    case = Case(tuple((start, 1) for start in starts), kv_heads=1, num_sms=7)
    plan, _ = plans(case, device)
    tiles = [-(-(end - begin) // 64) for _, begin, end, _ in plan.tasks]
    shares = [sum(tiles[first:after]) for first, after in itertools.pairwise(plan.bins)]
    total = sum(start // 64 + 1 for start in starts)
    share = -(-total // len(shares))
    used = -(-total // share)
    assert shares[: used - 1] == [share] * (used - 1)
    assert 0 < shares[used - 1] <= share
    assert shares[used:] == [0] * (len(shares) - used)


@pytest.mark.parametrize(("rows", "head_dim", "programs"), [(16, 128, 2), (64, 64, 2), (16, 256, 1)])
def test_there_are_as_many_bins_as_programs_are_computed_at_once(rows: int, head_dim: int, programs: int) -> None:
    case = Case(((10**6, 1),), heads=32, kv_heads=8, head_dim=head_dim, rows=rows, num_sms=132)
    assert limits_of(case).num_bins == programs * 132 // 8


BATCH = Case(((130, 1), (64, 1), (20, 1)), num_sms=2, dtype=torch.bfloat16)


def test_where_pages_lie_changes_nothing(device: torch.device) -> None:
    step = make(BATCH, device)
    order = torch.randperm(step.keys.shape[0], generator=torch.Generator().manual_seed(5)).to(device)
    is_page = step.page_table < 10**6
    table = step.page_table.clone()
    table[is_page] = order.argsort()[table[is_page].long()].int()
    moved = replace(step, keys=step.keys[order], values=step.values[order], page_table=table)
    assert torch.equal(run(kernel, BATCH, step)[:3], run(kernel, BATCH, moved)[:3])


def test_other_sequences_do_not_change_a_row(device: torch.device) -> None:
    uncut = replace(BATCH, kv_heads=4, num_sms=1)
    step = make(uncut, device)
    whole = run(kernel, uncut, step)
    alone = replace(uncut, sequences=uncut.sequences[:1])
    step = replace(step, batch=tables(alone, device))
    assert torch.equal(run(kernel, alone, step)[0], whole[0])
    assert step.work.num_rows_1 == 0


def test_splitting_changes_a_result_by_rounding_alone(device: torch.device) -> None:
    case = Case(((300, 1),), 4, 4)
    outs = []
    for num_sms, parts in ((1, 1), (4, 2), (64, 5)):
        work = poisoned(replace(limits_of(case), num_sms=num_sms), device)
        outs.append(run(kernel, case, replace(make(case, device), work=work))[:1])
        assert work.rows[: int(work.num_rows_1), 2].tolist() == ([parts] if parts > 1 else [])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, 1.0])
def test_more_parts_than_a_step_of_the_merge_are_merged(sinks: float | None, device: torch.device) -> None:
    case = Case(((700, 1),), heads=5, kv_heads=1, num_sms=64, sinks=sinks)
    work = poisoned(replace(limits_of(case), max_tokens=40, max_sequences=40), device)
    step = replace(make(case, device), work=work)
    check(run(kernel, case, step), dense(case, step), TOLERANCE[case.dtype])
    assert work.rows[0, 2] > kernel.choose_merge(work.limits).block_splits


@pytest.mark.parametrize(("sequences", "splits"), [(1, 64), (3, 16), (16, 8), (64, 8)])
def test_the_merge_takes_the_parts_of_like_sequences_in_one_step(sequences: int, splits: int) -> None:
    case = Case(((5000, 1),) * (sequences - 1) or ((5000, 1),), 32, 8, head_dim=128, num_sms=132)
    limits = replace(limits_of(case), max_sequences=sequences)
    assert kernel.choose_merge(limits).block_splits == splits
    assert splits >= min(limits.num_bins // sequences + 2, 64)


def test_a_window_that_covers_everything_is_no_window(device: torch.device) -> None:
    windowed = replace(BATCH, window=131)
    step = make(BATCH, device)
    assert torch.equal(run(kernel, windowed, step)[:3], run(kernel, BATCH, step)[:3])


def test_a_sink_of_minus_infinity_is_no_sink(device: torch.device) -> None:
    step = make(BATCH, device)
    sunk = replace(step, sinks=torch.full((4,), -math.inf, device=device))
    assert torch.equal(run(kernel, BATCH, sunk)[:3], run(kernel, BATCH, step)[:3])


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    step = make(BATCH, device)
    step = replace(step, query=step.query * 300)
    check(run(kernel, BATCH, step), run(reference, BATCH, step), TOLERANCE[BATCH.dtype])


def test_memory_for_more_serves_a_smaller_launch(device: torch.device) -> None:
    step = make(BATCH, device)
    large = poisoned(replace(step.work.limits, max_sequences=40, max_tokens=100), device)
    small = large.for_capacity(4, 3)
    assert small.limits == replace(large.limits, max_sequences=4, max_tokens=3)
    assert small.limits.max_tasks < large.limits.max_tasks
    assert torch.equal(run(kernel, BATCH, replace(step, work=small))[:3], run(kernel, BATCH, step)[:3])


@pytest.mark.parametrize("module", [kernel, reference])
def test_rows_of_two_sequences_may_share_a_span(module: ModuleType, device: torch.device) -> None:
    """Both have their first 96 keys in the same pages; a task reads those once, and another each one's own."""
    case = Case(((100, 1), (149, 1)), page_size=16, dtype=torch.bfloat16)
    step = make(case, device)
    step.page_table[3, :6] = step.page_table[1, :6]
    work = step.work
    entries = {0: [(0, 100, 0), (1, 149, 2)], 1: [(0, 100, 1)], 2: [(1, 149, 3)]}
    for task, span in enumerate([(3, 0, 96, 2), (1, 96, 101, 1), (3, 96, 150, 1)]):
        work.tasks[task] = torch.tensor(span)
        work.entries[task, : span[3]] = torch.tensor(entries[task])
    work.bins[:] = 3
    work.bins[:2] = torch.tensor([0, 1])
    work.rows[:2] = torch.tensor([(0, 0, 2), (1, 2, 2)])
    work.num_rows_1.fill_(2)
    check(attend(module, case, step), dense(case, step), TOLERANCE[case.dtype])


@pytest.mark.parametrize("module", [kernel, reference])
def test_a_span_of_which_a_row_sees_nothing_adds_nothing(module: ModuleType, device: torch.device) -> None:
    case = Case(((100, 1),), page_size=16, window=20, sinks=0.0)
    step = make(case, device)
    work = poisoned(replace(step.work.limits, max_length=1000), device)
    for task, span in enumerate([(1, 0, 64, 1), (1, 64, 101, 1)]):
        work.tasks[task] = torch.tensor(span)
        work.entries[task, 0] = torch.tensor([0, 100, task])
    work.bins[:] = 2
    work.bins[0] = 0
    work.rows[0] = torch.tensor([0, 0, 2])
    work.num_rows_1.fill_(1)
    step = replace(step, work=work)
    check(attend(module, case, step), dense(case, step), TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    "sizes", [{"rows_per_task": 24}, {"num_heads": 64}, {"page_size": 8}, {"page_size": 48}], ids=str
)
def test_sizes_without_a_kernel_are_refused(sizes: dict[str, int]) -> None:
    limits = limits_of(Case(((1, 1),)))
    with pytest.raises(ValueError, match=r"rows|page size"):
        replace(limits, **sizes)


def random_tree(seed: int) -> Case:
    """A batch of sequences with nested spans in common, and some that share nothing or extend by more than a task."""
    draw = random.Random(seed)
    page_size, dtype = draw.choice([(16, torch.float32), (64, torch.float32), (64, torch.bfloat16)])
    rows = 64 if dtype == torch.bfloat16 else draw.choice([16, 32])
    longest = draw.choice([1, 1, 2, 5])
    count = draw.randint(2, 8)
    starts, spans = [0] * count, []
    groups = [(0, sorted(draw.sample(range(count), draw.randint(2, count))))]
    while groups:
        begin, members = groups.pop()
        end = begin + page_size * draw.randint(1, 80 // page_size + 1)
        spans.append((begin, end, tuple(members)))
        for index in members:
            starts[index] = end
        cut = draw.randint(0, len(members))
        groups += [(end, part) for part in (members[:cut], members[cut:]) if len(part) > 1 and draw.random() < 0.7]
    sequences = [(start + draw.randint(0, 90), draw.randint(1, longest + 1)) for start in starts]
    return Case(
        tuple(sequences),
        *draw.choice([(2, 1), (4, 2), (6, 2)]),
        page_size=page_size,
        rows=rows,
        num_sms=draw.choice([1, 2, 5]),
        max_row_tokens=longest,
        dtype=dtype,
        seed=seed,
        shared=tuple(spans),
    )


@pytest.mark.parametrize("seed", range(16))
def test_random_trees_read_once_give_the_dense_formula(seed: int, device: torch.device) -> None:
    case = random_tree(seed)
    by_kernel, by_reference = plans(case, device)
    assert by_kernel == by_reference
    step = make(case, device)
    check(run(kernel, case, step), dense(case, step), TOLERANCE[case.dtype])
