"""The kernel draws the reference's tokens; the reference agrees with the CPU sampler and with exact probabilities."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from sgray.engine.sampler import Counts, RowSampling, _best
from sgray.engine.sampler import adjust as adjust_on_cpu
from sgray.engine.sampler import token_logprobs as logprobs_on_cpu
from sgray.kernels.sampling import kernel, reference
from sgray.kernels.sampling.state import (
    GENERATED_BITS,
    PROMPT_BIT,
    SamplingState,
    describe,
    store,
)
from sgray.protocol import MAX_END_IDS, SamplingParams

IMPLEMENTATIONS = pytest.mark.parametrize("sample", [kernel.sample, reference.sample], ids=["kernel", "reference"])
VOCAB = 130


@dataclasses.dataclass(frozen=True)
class Row:
    """One row's wishes; `index` generated tokens exist already."""

    params: SamplingParams
    seed: int = 0
    index: int = 0
    num_prompt: int = 3
    end_ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    is_masked: bool = False

    @property
    def position(self) -> int:
        return self.num_prompt + self.index


def prepare(rows: list[Row], slots: list[int], vocab_size: int, device: torch.device) -> SamplingState:
    state = SamplingState.allocate(max(slots) + 1, vocab_size, device, max_rows=len(rows))
    state.counts_SV.fill_(77)  # garbage that nobody without a penalty may read
    state.adjusted_RV.fill_(float("nan"))
    state.near_values_RC.fill_(float("nan"))
    state.tops_RN.fill_(float("nan"))
    descriptions = [
        describe(
            row.params,
            seed=row.seed,
            num_prompt=row.num_prompt,
            end_ids=row.end_ids,
            tokens=row.tokens,
            is_masked=row.is_masked,
        )
        for row in rows
    ]
    store(state, descriptions, slots)
    return state


def draw(sample, logits_RV: Tensor, rows: list[Row], *, slots: list[int] | None = None, **options) -> Tensor:
    """The tokens, on the CPU."""
    return draw_and_count(sample, logits_RV, rows, slots=slots, **options)[0]


def draw_and_count(sample, logits_RV, rows, *, slots=None, **options) -> tuple[Tensor, Tensor]:
    slots = slots or list(range(len(rows)))
    state = prepare(rows, slots, logits_RV.shape[1], logits_RV.device)
    tokens_R = torch.full((len(rows),), -7, dtype=torch.int32, device=logits_RV.device)
    slots_R = torch.tensor(slots, dtype=torch.int32, device=logits_RV.device)
    positions_R = torch.tensor([row.position for row in rows], dtype=torch.int32, device=logits_RV.device)
    before = logits_RV.clone()
    sample(logits_RV, slots_R, positions_R, state, tokens_R, **options)
    assert torch.equal(logits_RV.nan_to_num(nan=1e30), before.nan_to_num(nan=1e30))
    return tokens_R.cpu(), state.counts_SV.cpu()


def logits(num_rows: int, vocab_size: int, device: torch.device, *, scale: float = 3.0, seed: int = 0) -> Tensor:
    """Rows within a larger tensor of NaN, as padded logits are."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.full((num_rows, vocab_size + 6), float("nan"))
    padded[:, :vocab_size] = torch.randn(num_rows, vocab_size, generator=generator) * scale
    return padded.to(device)[:, :vocab_size]


def bitmask(allowed_RV: Tensor) -> Tensor:
    num_words = -(-allowed_RV.shape[1] // 32)
    padded = torch.zeros(len(allowed_RV), num_words * 32, dtype=torch.int64)
    padded[:, : allowed_RV.shape[1]] = allowed_RV
    words = (padded.view(len(allowed_RV), num_words, 32) << torch.arange(32)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def random_row(dice: random.Random, vocab_size: int) -> Row:
    def some(*values):
        return dice.choice(values)

    params = SamplingParams(
        temperature=some(0.0, 0.2, 1.0, 1.0, 1.7),
        top_k=some(0, 0, 1, 2, 5, 40, vocab_size - 1, vocab_size + 5),
        top_p=some(1.0, 1.0, 0.05, 0.5, 0.9, 0.999),
        min_p=some(0.0, 0.0, 0.02, 0.3, 1.0),
        repetition_penalty=some(1.0, 1.0, 1.3),
        frequency_penalty=some(0.0, 0.0, 0.5),
        presence_penalty=some(0.0, 0.0, -0.4),
        min_new_tokens=some(0, 3),
        logit_bias={dice.randrange(vocab_size): dice.uniform(-5, 5) for _ in range(some(0, 0, 20))},
    )
    num_prompt, index = dice.randrange(1, 20), dice.randrange(6)
    return Row(
        params,
        seed=dice.getrandbits(64),
        index=index,
        num_prompt=num_prompt,
        end_ids=tuple(dice.sample(range(vocab_size), some(0, 2, min(MAX_END_IDS, vocab_size - 5)))),
        tokens=tuple(dice.randrange(vocab_size) for _ in range(num_prompt + index)),
        is_masked=some(False, False, True),
    )


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(37, 9), (130, 12), (2500, 8)])
def test_the_kernel_draws_the_references_tokens(vocab_size: int, num_rows: int, device: torch.device) -> None:
    dice = random.Random(vocab_size)
    rows = [random_row(dice, vocab_size) for _ in range(num_rows)]
    logits_RV = logits(num_rows, vocab_size, device, seed=vocab_size)
    logits_RV[::7] = logits_RV[::7].round()  # ties
    mask = bitmask(torch.rand(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) < 0.4).to(device)
    got, got_counts = draw_and_count(kernel.sample, logits_RV, rows, bitmask_RW=mask)
    wanted, wanted_counts = draw_and_count(reference.sample, logits_RV, rows, bitmask_RW=mask)
    assert got.tolist() == wanted.tolist()
    assert torch.equal(got_counts, wanted_counts)


@pytest.mark.parametrize("flatness", [0.0, 0.05, 40.0])
def test_filters_that_keep_thousands_of_tokens_are_exact(flatness: float, device: torch.device) -> None:
    """More tokens near the edge than one program holds, up to a row of nothing but equals."""
    vocab_size = 6000
    params = [
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.97, temperature=0.7),
        SamplingParams(top_k=3000),
        SamplingParams(top_k=4500, top_p=0.8, temperature=2.0, min_p=0.01),
        SamplingParams(top_k=50, top_p=0.9),
    ]
    rows = [Row(one, seed=seed) for seed, one in enumerate(params)]
    logits_RV = logits(1, vocab_size, device, scale=flatness).expand(len(rows), -1).contiguous()
    assert draw(kernel.sample, logits_RV, rows).tolist() == draw(reference.sample, logits_RV, rows).tolist()


@pytest.mark.parametrize("kind", ["spread", "ties", "masked"])
def test_filters_that_keep_few_of_many_parts_are_exact(kind: str, device: torch.device) -> None:
    """The list of what the filters may leave is taken from what the parts found, with parts that have nothing."""
    vocab_size = 7_500
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_k=7, temperature=2.0),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_p=0.9, temperature=0.7),
        SamplingParams(top_p=0.6, min_p=0.05),
        SamplingParams(min_p=0.02),
    ]
    rows = [Row(one, seed=seed, is_masked=kind == "masked") for seed, one in enumerate(params)]
    logits_RV = logits(len(rows), vocab_size, device, scale=4.0)
    allowed = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    allowed[:, 2040:2060] = True
    if kind == "ties":
        logits_RV = logits_RV.round()
    mask = bitmask(allowed).to(device)
    tokens = draw(kernel.sample, logits_RV, rows, bitmask_RW=mask).tolist()
    assert tokens == draw(reference.sample, logits_RV, rows, bitmask_RW=mask).tolist()


def test_the_edges_of_filters_are_exact(device: torch.device) -> None:
    """With a temperature so high that every kept token can win, many seeds show which tokens are kept."""
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, -1.0]], device=device)
    for params, wanted in (
        (SamplingParams(top_k=4, temperature=50.0), {1, 3, 2, 4}),
        (SamplingParams(top_k=2, temperature=50.0), {1, 3}),
        (SamplingParams(top_p=0.49, temperature=1e5), {1, 3, 2, 4}),
        (SamplingParams(top_k=4, top_p=0.49, temperature=1e5), {1, 3}),
        (SamplingParams(min_p=0.95, temperature=50.0), {1, 3, 2, 4, 5, 0}),
    ):
        rows = [Row(params, seed=seed) for seed in range(80)]
        tokens = draw(reference.sample, values.expand(80, -1).contiguous(), rows).tolist()
        assert set(tokens) == wanted, params
        assert draw(kernel.sample, values.expand(3, -1).contiguous(), rows[:3]).tolist() == tokens[:3]


@IMPLEMENTATIONS
def test_greedy_is_the_largest_and_the_lowest_of_equals(sample, device: torch.device) -> None:
    logits_RV = logits(12, 2500, device).round()
    cold = [Row(SamplingParams(temperature=0.0, top_p=0.3))] * 6
    narrow = [Row(SamplingParams(temperature=1.0, top_k=1))] * 6
    wanted = [row.tolist().index(max(row.tolist())) for row in logits_RV]
    assert draw(sample, logits_RV, cold + narrow).tolist() == wanted


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=9),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "top-k", "top-p", "all"],
)
def test_draws_follow_the_exact_probabilities(params: SamplingParams, device: torch.device) -> None:
    """Chi-square over many seeds against the probabilities that the CPU sampler draws from."""
    size, num_draws = 37, 20_000
    logits_V = logits(1, size, torch.device("cpu"), scale=1.5)[0]
    weights = torch.softmax(logits_V / params.temperature, dim=0)
    best, ids = _best(weights, params)
    best = torch.where(best < params.min_p * best[0], 0.0, best).double()
    probabilities = torch.zeros(size, dtype=torch.float64).scatter(0, ids, best / best.sum())
    seeds, indices = torch.arange(num_draws) // 100, torch.arange(num_draws) % 100
    state = prepare([Row(params)], [0], size, torch.device("cpu"))
    slots = torch.zeros(num_draws, dtype=torch.int64)
    columns = state.ints_S.repeat(num_draws, 1)
    columns[:, 1] = seeds.int()
    state = dataclasses.replace(state, ints_S=columns, floats_S=state.floats_S.repeat(num_draws, 1))
    tokens = reference._choose(logits_V.expand(num_draws, -1), state, torch.arange(num_draws) + slots, indices)
    observed = torch.bincount(tokens, minlength=size).double()
    assert observed[probabilities == 0].sum() == 0
    expected = probabilities * num_draws
    is_common = expected >= 5
    pooled = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
    hoped = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    chi_square = ((pooled - hoped)[hoped > 0] ** 2 / hoped[hoped > 0]).sum()
    freedom = int((hoped > 0).sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_neighbouring_seeds_indices_and_tokens_are_independent() -> None:
    """The noise, turned back into uniform numbers, is uncorrelated along every axis, and its tail is resolved."""
    seeds = torch.arange(64) * 2**32 + torch.arange(64).flip(0)
    noise = torch.stack([reference.noise(seeds, torch.full((64,), index), 256) for index in range(16)])
    uniforms = (-(-noise.double()).exp2()).exp()
    assert abs(float(uniforms.mean()) - 0.5) < 4 * (1 / 12 / uniforms.numel()) ** 0.5
    for axis in range(3):
        size = uniforms.shape[axis]
        for step in (1, 2, 8):
            ahead, behind = uniforms.narrow(axis, step, size - step), uniforms.narrow(axis, 0, size - step)
            products = (ahead - 0.5) * (behind - 0.5) * 12
            assert abs(float(products.mean())) < 4 / products.numel() ** 0.5, (axis, step)
    many = reference.noise(torch.arange(8), torch.zeros(8, dtype=torch.int64), 200_000)
    assert many.isfinite().all()
    # The largest of n such numbers is about log2(n) and hardly ever 12 above that.
    assert 15 < float(many.max()) < 33
    assert len(many[0].topk(100).values.unique()) == 100


@IMPLEMENTATIONS
def test_a_token_depends_on_nothing_of_its_batch(sample, device: torch.device) -> None:
    dice = random.Random(5)
    rows = [dataclasses.replace(random_row(dice, VOCAB), is_masked=False) for _ in range(8)]
    logits_RV = logits(8, VOCAB, device)
    together = draw(sample, logits_RV, rows)
    order = random.Random(6).sample(range(8), 8)
    mixed = draw(sample, logits_RV[order], [rows[i] for i in order], slots=random.Random(7).sample(range(40), 8))
    assert mixed.tolist() == together[order].tolist()
    for index in range(6):
        assert draw(sample, logits_RV[index : index + 1], [rows[index]]).item() == together[index]


def test_the_seed_and_the_index_change_the_draw_and_the_place_in_the_sequence_does_not(device: torch.device) -> None:
    flat = torch.zeros(3, 2000, device=device)
    hot = SamplingParams()
    base = draw(kernel.sample, flat, [Row(hot, seed=9, index=4, num_prompt=n) for n in (1, 5, 900)])
    assert len(set(base.tolist())) == 1
    others = [Row(hot, seed=10, index=4), Row(hot, seed=9 + 2**32, index=4), Row(hot, seed=9, index=5)]
    assert len({*draw(kernel.sample, flat, others).tolist(), int(base[0])}) == 4


@IMPLEMENTATIONS
def test_a_filter_that_keeps_all_changes_no_token(sample, device: torch.device) -> None:
    plain = [Row(SamplingParams(temperature=1.2), seed=seed) for seed in range(4)]
    wide = [
        Row(SamplingParams(temperature=1.2, top_p=0.9999999, top_k=VOCAB - 1, min_p=1e-30), seed=s) for s in range(4)
    ]
    logits_RV = logits(4, VOCAB, device, scale=1.0)
    assert draw(sample, logits_RV, plain).tolist() == draw(sample, logits_RV, wide).tolist()


@IMPLEMENTATIONS
def test_a_mask_holds_for_rows_that_ask_for_it(sample, device: torch.device) -> None:
    logits_RV = logits(6, VOCAB, device)
    allowed = torch.zeros(6, VOCAB, dtype=torch.bool)
    only = torch.tensor([0, 31, 32, 63, 129, 129])
    allowed[torch.arange(6), only] = True
    wishes = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.2)]
    rows = [Row(params, is_masked=True) for params in wishes] + [Row(wishes[1], is_masked=True), Row(wishes[0])]
    tokens = draw(sample, logits_RV, rows, bitmask_RW=bitmask(allowed).to(device))
    assert tokens.tolist() == [*only[:5].tolist(), int(logits_RV[5].argmax())]


@IMPLEMENTATIONS
def test_rows_that_are_not_finite_fail_alone(sample, device: torch.device) -> None:
    logits_RV = logits(8, VOCAB, device)
    logits_RV[1, 77] = float("nan")
    logits_RV[3, 5] = float("inf")
    logits_RV[5] = float("-inf")
    logits_RV[6, :100] = float("-inf")
    logits_RV[7, 2] = float("nan")
    kinds = [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_k=4)]
    rows = [Row(kinds[i % 4]) for i in range(7)]
    rows.append(Row(SamplingParams(min_new_tokens=9), end_ids=(2,), is_masked=True))
    nothing = bitmask(torch.zeros(8, VOCAB, dtype=torch.bool)).to(device)
    tokens = draw(sample, logits_RV, rows, bitmask_RW=nothing).tolist()
    assert [index for index, token in enumerate(tokens) if token == -1] == [1, 3, 5, 7]
    assert tokens[6] >= 100


@IMPLEMENTATIONS
def test_a_row_without_an_allowed_token_fails(sample, device: torch.device) -> None:
    rows = [Row(SamplingParams(), is_masked=True), Row(SamplingParams(temperature=0.0, top_p=0.5), is_masked=True)]
    nothing = bitmask(torch.zeros(2, VOCAB, dtype=torch.bool)).to(device)
    assert draw(sample, logits(2, VOCAB, device), rows, bitmask_RW=nothing).tolist() == [-1, -1]


@IMPLEMENTATIONS
def test_skipped_rows_keep_what_they_held(sample, device: torch.device) -> None:
    logits_RV = logits(5, VOCAB, device)
    logits_RV[4] = float("nan")
    rows = [Row(SamplingParams(temperature=0.0))] * 5
    state = prepare(rows, list(range(5)), VOCAB, device)
    slots_R = torch.tensor([0, -1, 2, 2**30, -(2**31)], dtype=torch.int32, device=device)
    positions_R = torch.full((5,), 3, dtype=torch.int32, device=device)
    tokens_R = torch.full((5,), -7, dtype=torch.int32, device=device)
    num_rows_1 = torch.tensor([3], dtype=torch.int32, device=device)
    sample(logits_RV, slots_R, positions_R, state, tokens_R, num_rows_1=num_rows_1)
    best = logits_RV.argmax(dim=1).tolist()
    assert tokens_R.tolist() == [best[0], -7, best[2], -7, -7]


def test_adjustments_are_the_cpu_samplers() -> None:
    dice = random.Random(2)
    for _ in range(15):
        row = random_row(dice, VOCAB)
        state = prepare([row], [0], VOCAB, torch.device("cpu"))
        logits_V = logits(1, VOCAB, torch.device("cpu"), seed=row.seed % 1000)[0]
        wanted = logits_V.clone()
        is_penalised = (row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty) != (
            1,
            0,
            0,
        )
        counts = Counts.of(list(row.tokens), row.num_prompt, VOCAB, wanted.device) if is_penalised else None
        adjust_on_cpu(wanted, RowSampling(row.params, row.seed, row.index, row.end_ids, counts))
        torch.testing.assert_close(reference.adjust(logits_V, state, 0, row.index, None), wanted)


@IMPLEMENTATIONS
def test_the_drawn_token_is_counted_for_penalised_slots_alone(sample, device: torch.device) -> None:
    logits_RV = torch.full((4, VOCAB), -1.0, device=device)
    logits_RV[:, 7] = 90.0
    logits_RV[3, 7] = float("nan")
    penalised = SamplingParams(temperature=0.0, frequency_penalty=0.1)
    seen = (7, 7, 8, 7, 9, 9)
    rows = [
        Row(penalised, tokens=seen),
        Row(SamplingParams(temperature=0.0), tokens=seen),
        Row(penalised, tokens=(7,) * 20_000, num_prompt=0),
        Row(penalised, tokens=seen),
    ]
    tokens, counts = draw_and_count(sample, logits_RV.index_fill(0, torch.tensor([2], device=device), -1.0), rows)
    assert tokens.tolist() == [7, 7, 0, -1]
    logits_RV[2, 7] = 1e9
    tokens, counts = draw_and_count(sample, logits_RV, rows)
    assert tokens.tolist() == [7, 7, 7, -1]
    wanted = torch.zeros(VOCAB, dtype=torch.int16)
    wanted[7:10] = torch.tensor([PROMPT_BIT + 1 + 1, PROMPT_BIT, 2], dtype=torch.int16)
    assert torch.equal(counts[0, :VOCAB], wanted)
    assert (counts[1] == 77).all()
    assert counts[2, 7] == GENERATED_BITS
    wanted[7] -= 1
    assert torch.equal(counts[3, :VOCAB], wanted)


def test_a_slot_is_described_anew_without_traces_of_its_last_sequence(device: torch.device) -> None:
    state = SamplingState.allocate(3, VOCAB, device)
    heavy = SamplingParams(logit_bias={5: 50.0}, repetition_penalty=2.0, min_new_tokens=4)
    first = describe(heavy, seed=1, num_prompt=2, end_ids=[4], tokens=[1, 2, 3])
    store(state, [first, first], [2, 0])
    light = SamplingParams(frequency_penalty=1.0, temperature=0.0)
    store(state, [describe(light, seed=-1, num_prompt=1, end_ids=[], tokens=[6, 6])], [2])
    assert state.ints_S[2].tolist() == [0, -1, -1, 1, 0, 0, 0, 2]
    assert state.floats_S[2].tolist() == [0, 1, 0, 1, 1, 0, 0, 0]
    counts = state.counts_SV[2].cpu()
    assert counts.nonzero().flatten().tolist() == [6]
    assert counts[6] == PROMPT_BIT + 1
    assert state.ints_S[0].tolist() == [0, 1, 0, 2, 4, 1, 1, 2]
    assert state.ints_S[1].tolist() == [0] * 8


def test_log_probabilities_are_the_cpu_samplers(device: torch.device) -> None:
    logits_RV = logits(4, VOCAB, device)
    tokens_R = torch.tensor([5, 129, -1, 0], dtype=torch.int32, device=device)
    chosen, ids, values = reference.token_logprobs(logits_RV, tokens_R, 3)
    assert chosen[2].isnan()
    assert torch.equal(reference.logprobs(logits_RV, tokens_R).nan_to_num(), chosen.nan_to_num())
    for row in (0, 1, 3):
        wanted = logprobs_on_cpu(logits_RV[row : row + 1].cpu(), [int(tokens_R[row])], [3], [(7, 0)])[0]
        assert float(chosen[row]) == pytest.approx(wanted.logprob, abs=1e-5)
        assert ids[row].tolist() == [token for token, _ in wanted.top]
        assert values[row].tolist() == pytest.approx([value for _, value in wanted.top], abs=1e-5)
        asked = torch.tensor([[7, 0]], dtype=torch.int32, device=device)
        own = reference.id_logprobs(logits_RV[row : row + 1], asked)[0]
        assert own.tolist() == pytest.approx(wanted.of_ids, abs=1e-5)
