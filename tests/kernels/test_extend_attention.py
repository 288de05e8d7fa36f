"""Attention of extends: the kernel against plain torch, plain torch against the formula in float64, and equalities."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgray.kernels.batch import BatchTables
from sgray.kernels.extend_attention import kernel, reference
from sgray.kernels.extend_attention.kernel import ExtendPages
from sgray.kernels.extend_attention.work import ROWS, ExtendWork, choose_rows

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
GARBAGE = 2**30  # an address made of it is no address
SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 16}


@dataclass
class Step:
    """Sequence b has all its keys and values in `dense[b]` and computes (start, length) = `spans[b]`."""

    spans: list[tuple[int, int]]
    dense: list[tuple[Tensor, Tensor]]
    query: Tensor
    keys: Tensor
    values: Tensor
    page_table: Tensor
    batch: BatchTables
    out: Tensor

    @property
    def rows(self) -> list[slice]:
        firsts = self.batch.firsts_B.tolist()
        return [slice(firsts[b], firsts[b] + length) for b, (_, length) in enumerate(self.spans)]

    def run(self, form, *, min_length=1, longest=0, only_last=False, pages=None, **options) -> Tensor:
        heads, head_dim = self.query.shape[1:]
        work = ExtendWork.allocate(
            max_sequences=len(self.batch.slots_B),
            max_tokens=len(self.query),
            num_heads=heads,
            num_kv_heads=self.keys.shape[2],
            head_dim=head_dim,
            device=self.query.device,
            large_from=ExtendPages.of(self.keys, self.values).large_from,
        )
        plan = form.plan_extends(work, self.batch, min_length=min_length, longest=longest, only_last=only_last)
        pages = pages or form.ExtendPages.of(self.keys, self.values)
        out = self.out.clone()
        options = {"scale": head_dim**-0.5, **options}
        form.attend_extends(self.query, pages, self.page_table, plan, out, **options)
        return out

    def only(self, chosen: list[int]) -> "Step":
        """The same with some of the sequences; their rows stay where they are."""
        batch = self.batch
        fields = ("slots_B", "starts_B", "lengths_B", "firsts_B")
        parts = {name: getattr(batch, name)[chosen].clone() for name in fields}
        count = torch.full_like(batch.num_sequences_1, len(chosen))
        return replace(self, batch=replace(batch, **parts, num_sequences_1=count))


def make_step(
    device, spans, *, heads=4, kv_heads=2, head_dim=64, page_size=64, dtype=torch.float32, padding=3, seed=0
) -> Step:
    """Everything that nothing was written to holds NaN or garbage."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    counts = [-(-(start + length) // page_size) for start, length in spans]
    order = torch.randperm(sum(counts) + 2, generator=generator, dtype=torch.int32)
    pool = torch.full((len(order), 2, 2, page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    table = torch.full((len(spans) + 1, max(counts) + 1), GARBAGE, dtype=torch.int32)
    dense = []
    for b, (start, length) in enumerate(spans):
        ids, order = order[: counts[b]], order[counts[b] :]
        table[len(spans) - b, : counts[b]] = ids
        sides = noise(start + length, kv_heads, head_dim), noise(start + length, kv_heads, head_dim)
        dense.append(tuple(side.to(device) for side in sides))
        for position in range(start + length):
            page, token = ids[position // page_size], position % page_size
            pool[page, 1, :, token] = torch.stack([side[position] for side in sides])
    lengths = [length for _, length in spans]
    firsts = [sum(lengths[:b]) for b in range(len(spans))]
    columns = ([len(spans) - b for b in range(len(spans))], [start for start, _ in spans], lengths, firsts)
    tables = [torch.tensor([*column, GARBAGE, GARBAGE], dtype=torch.int32, device=device) for column in columns]
    counters = [torch.tensor([count], dtype=torch.int32, device=device) for count in (len(spans), sum(lengths))]
    query = torch.full((sum(lengths) + padding, heads, head_dim), torch.nan, dtype=dtype)
    query[: sum(lengths)] = noise(sum(lengths), heads, head_dim)
    query, pool = query.to(device), pool.to(device)
    batch = BatchTables(*tables, *counters)
    return Step(
        spans, dense, query, pool[:, 1, 0], pool[:, 1, 1], table.to(device), batch, torch.full_like(query, torch.nan)
    )


def formula(step: Step, b: int, *, scale=None, window=None, softcap=None, sinks_H=None) -> Tensor:
    """Sequence b's rows, each on its own, in float64."""
    start, length = step.spans[b]
    keys, values = (side.double().cpu() for side in step.dense[b])
    query = step.query[step.rows[b]].double().cpu()
    heads, head_dim = query.shape[1:]
    out = torch.zeros_like(query)
    for t in range(length):
        for h in range(heads):
            first = 0 if window is None else max(start + t + 1 - window, 0)
            seen = slice(first, start + t + 1), h * keys.shape[1] // heads
            scores = keys[seen] @ query[t, h] * (scale or head_dim**-0.5)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            terms = scores.exp()
            total = terms.sum() + (0 if sinks_H is None else math.exp(sinks_H[h]))
            out[t, h] = terms / total @ values[seen]
    return out.to(step.out)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Where one holds NaN, nothing was written, and the other must hold it too."""
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    assert (found - wanted).norm() <= TOLERANCE[torch.float32] * wanted.norm()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """As `assert_same`, within the rounding of the type."""
    assert torch.equal(found.isnan(), wanted.isnan())
    tolerance = TOLERANCE[found.dtype]
    found, wanted = found.double().nan_to_num(), wanted.double().nan_to_num()
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    assert (found - wanted).abs().max() <= 20 * tolerance * max(wanted.abs().max(), 1)


OPTIONS = [
    {},
    {"window": 1},
    {"window": 70},
    {"softcap": 2.0},
    {"scale": 0.9},
    {"sinks_H": True},
    {"window": 33, "softcap": 3.0, "sinks_H": True},
]


def with_sinks(options: dict, step: Step) -> dict:
    sinks = torch.linspace(-1, 3, step.query.shape[1], device=step.query.device)
    return {**options, "sinks_H": sinks} if "sinks_H" in options else options


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_torch_computes_the_formula(device, options) -> None:
    step = make_step(device, [(0, 5), (40, 37), (63, 2)], **SMALL, page_size=16)
    options = with_sinks(options, step)
    out = step.run(reference, **options)
    for b, rows in enumerate(step.rows):
        assert_same(out[rows], formula(step, b, **options))
    assert out[step.rows[-1].stop :].isnan().all()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(("dtype", "page_size"), [(torch.float32, 16), (torch.bfloat16, 64)], ids=str)
def test_kernel_computes_what_torch_does(device, options, dtype, page_size) -> None:
    step = make_step(device, [(100, 29), (0, 9), (63, 2)], **SMALL, page_size=page_size, dtype=dtype)
    options = with_sinks(options, step)
    assert_close(step.run(kernel, **options), step.run(reference, **options))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (2, 2, 64, 16, torch.bfloat16),
        (9, 3, 64, 64, torch.bfloat16),
        (8, 2, 128, 64, torch.bfloat16),
        (16, 2, 64, 64, torch.bfloat16),
        (6, 2, 128, 16, torch.bfloat16),
        (4, 1, 64, 64, torch.float16),
        (3, 1, 64, 16, torch.float16),
        (8, 1, 128, 64, torch.float32),
        (4, 2, 64, 128, torch.bfloat16),
        (4, 2, 256, 64, torch.bfloat16),
    ],
)
def test_every_form_of_heads_pages_and_types(device, heads, kv_heads, head_dim, page_size, dtype) -> None:
    spans = [(70, 25), (0, 66)]
    step = make_step(device, spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    assert_close(step.run(kernel), step.run(reference))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("start", [0, 63, 64, 65])
def test_lengths_around_the_borders_of_tiles_and_pages(device, start, length) -> None:
    step = make_step(device, [(start, length)], **SMALL, dtype=torch.float16)
    assert_close(step.run(kernel), step.run(reference))


def test_large_tiles_compute_the_same(device) -> None:
    step = make_step(device, [(70, 101), (3, 7)], **SMALL, dtype=torch.bfloat16)
    small, large = step.run(kernel), step.run(kernel, longest=10_000)
    assert_close(large, small)


def test_bulk_loads_and_single_rows_agree(device) -> None:
    step = make_step(device, [(70, 40), (128, 1), (0, 5)], **SMALL, dtype=torch.bfloat16)
    rows = ExtendPages(step.keys, step.values, boxes=None)
    assert_same(step.run(kernel, pages=rows), step.run(kernel))


def test_bulk_loads_are_for_large_aligned_pages_of_half_precision(device) -> None:
    def has_boxes(page_size: int, dtype: torch.dtype, head_dim: int = 16) -> bool:
        pages = torch.zeros(3, page_size, 1, head_dim, dtype=dtype, device=device)
        return ExtendPages.of(pages, pages).boxes is not None

    assert has_boxes(64, torch.bfloat16) and has_boxes(128, torch.float16)
    assert not has_boxes(16, torch.bfloat16)
    assert not has_boxes(64, torch.float32)
    assert not has_boxes(64, torch.bfloat16, head_dim=4)


@pytest.mark.parametrize("form", [reference, kernel], ids=["torch", "triton"])
def test_short_sequences_are_left_to_others(device, form) -> None:
    step = make_step(device, [(9, 1), (20, 6), (3, 5), (0, 40)], **SMALL)
    out = step.run(form, min_length=6)
    assert_close(out, step.only([1, 3]).run(reference))
    assert out[step.rows[0]].isnan().all() and out[step.rows[2]].isnan().all()


@pytest.mark.parametrize("longest", [0, 10_000], ids=["small tiles", "large tiles"])
def test_the_last_tiles_alone_are_what_they_are_among_all(device, longest) -> None:
    step = make_step(device, [(70, 133), (9, 1), (20, 3), (0, 64), (5, 300)], **SMALL)
    whole = step.run(kernel, min_length=2, longest=longest)
    out = step.run(kernel, min_length=2, longest=longest, only_last=True)
    is_written = ~out.isnan()
    assert torch.equal(out[is_written], whole[is_written])
    per_tile = choose_rows(16, longest, ExtendPages.of(step.keys, step.values).large_from) // 2
    for rows, (_, length) in zip(step.rows, step.spans, strict=True):
        num_last = 0 if length < 2 else (length - 1) % per_tile + 1
        expected = torch.arange(length) >= length - num_last
        assert torch.equal(is_written[rows].cpu().flatten(1).all(dim=1), expected)


def test_nothing_to_extend_writes_nothing(device) -> None:
    step = make_step(device, [(9, 1), (20, 2)], **SMALL)
    assert step.run(kernel, min_length=3).isnan().all()
    step.batch.num_sequences_1.zero_()
    assert step.run(kernel).isnan().all()


@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=["plain", "window"])
def test_a_sequence_in_a_batch_equals_itself_alone(device, options) -> None:
    step = make_step(device, [(70, 33), (0, 1), (0, 70), (5, 12)], **SMALL, dtype=torch.bfloat16)
    together = step.run(kernel, **options)
    for b, rows in enumerate(step.rows):
        assert torch.equal(together[rows], step.only([b]).run(kernel, **options)[rows])


def test_chunks_compute_what_the_whole_does(device) -> None:
    whole = make_step(device, [(0, 150)], **SMALL, padding=0)
    wanted = whole.run(kernel)
    for start, stop in ((0, 83), (83, 84), (84, 150)):
        chunk = replace(whole.only([0]), query=whole.query[start:stop].contiguous(), out=whole.out[start:stop])
        chunk.batch.starts_B.fill_(start)
        chunk.batch.lengths_B.fill_(stop - start)
        assert_same(chunk.run(kernel), wanted[start:stop])


def test_a_window_as_long_as_the_context_is_none(device) -> None:
    step = make_step(device, [(70, 30), (0, 9)], **SMALL, dtype=torch.bfloat16)
    assert_same(step.run(kernel, window=100), step.run(kernel))


def test_a_sink_of_minus_infinity_is_none(device) -> None:
    step = make_step(device, [(70, 30), (0, 9)], **SMALL, dtype=torch.bfloat16)
    sinks = torch.full((2,), -torch.inf, device=device)
    assert_same(step.run(kernel, sinks_H=sinks), step.run(kernel))


def test_large_scores_neither_overflow_nor_vanish(device) -> None:
    step = make_step(device, [(70, 30)], **SMALL, dtype=torch.bfloat16)
    assert_close(step.run(kernel, scale=1000.0), step.run(reference, scale=1000.0))
    assert_close(step.run(kernel, scale=1000.0, softcap=5.0), step.run(reference, scale=1000.0, softcap=5.0))


@pytest.mark.parametrize("longest", [100, 10_000])
def test_tiles_cover_every_token_once_and_the_last_of_a_sequence_come_first(device, longest) -> None:
    lengths = [40, 0, 3, 22, 1, 85, 21]
    batch = BatchTables(
        slots_B=torch.arange(10, 19, dtype=torch.int32, device=device),
        starts_B=torch.arange(0, 900, 100, dtype=torch.int32, device=device),
        lengths_B=torch.tensor([*lengths, GARBAGE, -5], dtype=torch.int32, device=device),
        firsts_B=torch.tensor([0, 40, 40, 43, 65, 66, 151, 0, 0], dtype=torch.int32, device=device),
        num_sequences_1=torch.tensor([7], dtype=torch.int32, device=device),
        num_tokens_1=torch.tensor([172], dtype=torch.int32, device=device),
    )
    work = ExtendWork.allocate(max_sequences=9, max_tokens=200, num_heads=9, num_kv_heads=3, head_dim=64, device=device)
    work.tiles_N4.fill_(7)  # an earlier, fuller plan
    plan = kernel.plan_extends(work, batch, min_length=2, longest=longest)
    tokens = (ROWS if longest == 100 else 2 * ROWS) // 3
    wanted = [
        [10 + b, int(batch.firsts_B[b]) + offset, 100 * b + offset, min(tokens, length - offset)]
        for b, length in enumerate(lengths)
        if length >= 2
        for offset in reversed(range(0, length, tokens))
    ]
    assert plan.tokens == tokens
    assert plan.tiles_N4[: len(wanted)].tolist() == wanted
    assert len(wanted) <= plan.capacity(172) <= plan.capacity(200)
    assert not plan.tiles_N4[len(wanted) : plan.capacity(200), 3].any()


def test_the_plan_has_room_for_the_worst_step() -> None:
    work = ExtendWork.allocate(
        max_sequences=3, max_tokens=70, num_heads=6, num_kv_heads=2, head_dim=64, device=torch.device("cpu")
    )
    lengths = torch.tensor([22, 22, 26])  # a token over one tile of 21, twice
    assert len(work.tiles_N4) >= int(((lengths + 20) // 21).sum())
