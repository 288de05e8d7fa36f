"""The sampler against straightforward references."""

from __future__ import annotations

import math

import pytest
import torch

from sgray.engine.sampler import (
    Counts,
    RowSampling,
    adjust,
    has_penalty,
    rows_at_once,
    sample,
    token_logprobs,
    uniform,
)
from sgray.protocol import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 500


def row(
    params: SamplingParams,
    *,
    seed: int = 0,
    index: int = 0,
    end_ids: tuple[int, ...] = (),
    tokens: list[int] | None = None,
    num_prompt: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> RowSampling:
    counts = Counts.of(tokens or [], num_prompt, vocab_size, CPU) if has_penalty(params) else None
    return RowSampling(params, seed, index, end_ids, counts)


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def allowed(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The ids that temperature, top-k, top-p and min-p leave, by their definitions."""
    weights = torch.softmax(logits.double() / params.temperature, -1)
    order = sorted(range(len(weights)), key=lambda token: -float(weights[token]))
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    total = sum(float(weights[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < params.top_p * total:
            kept.append(token)
        mass += float(weights[token])
    best = float(weights[order[0]])
    return {token for token in kept if float(weights[token]) >= params.min_p * best}


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"repetition_penalty": 2.0}, [2, 1, -4, 1, 2, 2]),
        ({"frequency_penalty": 0.5}, [2, 2, -2, 1, 2, 2]),
        ({"presence_penalty": 0.5}, [2, 2, -2, 1.5, 2, 2]),
        ({"repetition_penalty": 0.5}, [2, 4, -1, 4, 2, 2]),
        ({"frequency_penalty": -1.0}, [2, 2, -2, 4, 2, 2]),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 2.0}, [2, 1, -4, -0.25, 2, 2]),
    ],
)
def test_penalties_pub_107(changes: dict, expected: list[float]) -> None:
    logits = torch.tensor([2.0, 2, -2, 2, 2, 2])
    adjust(logits, row(SamplingParams(**changes), tokens=[1, 1, 2, 3, 3], num_prompt=3, vocab_size=6))
    assert logits.tolist() == expected


def test_tokens_added_later_count_like_those_known_at_first_pub_107() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    known, grown = torch.full((6,), 2.0), torch.full((6,), 2.0)
    adjust(known, row(params, tokens=[1, 4, 4, 5], num_prompt=1, vocab_size=6))
    counts = Counts.of([1], 1, 6, CPU)
    for token in (4, 4, 5):
        counts.add(token)
    adjust(grown, RowSampling(params, 0, 3, (), counts))
    assert torch.equal(known, grown)


def test_penalties_belong_to_a_row_pub_108() -> None:
    logits = random_logits(1).repeat(2, 1)
    best = int(logits[0].argmax())
    plain = row(SamplingParams(temperature=0))
    penalised = row(SamplingParams(temperature=0, repetition_penalty=1.8), tokens=[best], num_prompt=1)
    alone = [sample(logits[:1], [one]).tokens[0] for one in (plain, penalised)]
    assert alone[0] == best != alone[1]
    assert sample(logits, [plain, penalised]).tokens == alone
    assert sample(logits, [penalised, plain]).tokens == alone[::-1]


def test_greedy_takes_the_largest() -> None:
    logits = random_logits(5)
    assert sample(logits, [row(SamplingParams(temperature=0))] * 5).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [1])
def test_top_k_of_one_is_greedy_pub_109(top_k: int) -> None:
    logits = random_logits(1)
    for seed in range(20):
        params = SamplingParams(temperature=1.0, top_k=top_k)
        assert sample(logits, [row(params, seed=seed)]).tokens == [int(logits[0].argmax())]


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 9999999])
def test_top_k_without_a_limit_pub_109(top_k: int) -> None:
    logits = random_logits(1)
    for seed in range(20):
        free = sample(logits, [row(SamplingParams(temperature=1.0), seed=seed)]).tokens
        assert sample(logits, [row(SamplingParams(temperature=1.0, top_k=top_k), seed=seed)]).tokens == free


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_k": 300},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 400, "top_p": 0.99, "min_p": 0.001},
        {"top_p": 0.99, "temperature": 5.0},
        {"top_k": 7, "temperature": 0.01},
    ],
)
def test_only_allowed_tokens_are_drawn_and_all_of_weight_can_be(changes: dict) -> None:
    params = SamplingParams(**{"temperature": 1.0, **changes})
    logits = random_logits(1, scale=1.5)
    expected = allowed(logits[0], params)
    rows = [row(params, seed=seed) for seed in range(600)]
    drawn = set(sample(logits.expand(600, -1), rows).tokens)
    assert drawn <= expected
    weights = torch.softmax(logits[0].double() / params.temperature, -1)
    assert {token for token in expected if float(weights[token]) > 0.03} <= drawn


@pytest.mark.parametrize("changes", [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 2.0}])
def test_draws_follow_the_distribution(changes: dict) -> None:
    params = SamplingParams(**{"temperature": 1.0, **changes})
    logits = random_logits(1, vocab_size=12, scale=1.0)
    left = allowed(logits[0], params)
    weights = torch.softmax(logits[0].double() / params.temperature, -1)
    weights = torch.tensor([float(weights[token]) if token in left else 0.0 for token in range(12)])
    rows = [row(params, seed=7, index=index, vocab_size=12) for index in range(4000)]
    drawn = torch.bincount(torch.tensor(sample(logits.expand(4000, -1), rows).tokens), minlength=12)
    deviation = (drawn / 4000 - weights / weights.sum()).abs()
    assert float(deviation.max()) < 4 * math.sqrt(0.25 / 4000)


def test_a_draw_depends_on_its_seed_and_index_alone_pub_059() -> None:
    logits = random_logits(4, vocab_size=49152)
    mine = row(SamplingParams(temperature=0.8), seed=42, index=3)
    alone = sample(logits[:1], [mine]).tokens[0]
    others = [
        row(SamplingParams(temperature=1.0), seed=5),
        row(SamplingParams(temperature=0.0)),
        row(SamplingParams(temperature=0.3, top_p=0.4, logit_bias={3: 5.0}), seed=9),
    ]
    for place in range(4):
        rows = [*others[:place], mine, *others[place:]]
        order = [*range(1, place + 1), 0, *range(place + 1, 4)]
        assert sample(logits[order], rows).tokens[place] == alone


def test_seeds_and_indices_give_different_draws_pub_060() -> None:
    logits = random_logits(1, scale=1.0)
    params = SamplingParams(temperature=1.0)
    draws = {
        tuple(sample(logits, [row(params, seed=seed, index=index)]).tokens[0] for index in range(8))
        for seed in range(6)
    }
    assert len(draws) == 6
    assert sample(logits, [row(params, seed=0)]).tokens == sample(logits, [row(params, seed=0)]).tokens


def test_the_uniform_number_is_fixed_and_even() -> None:
    assert uniform(42, 3) == uniform(42, 3) != uniform(42, 4) != uniform(43, 4)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    numbers = torch.tensor([uniform(seed, index) for seed in range(50) for index in range(100)])
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    assert float(torch.histc(numbers, 10, 0, 1).min()) > 400


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_large_bias_forces_a_token(temperature: float) -> None:
    logits = random_logits(3)
    rows = [row(SamplingParams(temperature=temperature, logit_bias={17 + i: 100.0}), seed=i) for i in range(3)]
    assert sample(logits, rows).tokens == [17, 18, 19]


def test_a_negative_bias_bans_a_token() -> None:
    logits = random_logits(1)
    best = int(logits[0].argmax())
    assert sample(logits, [row(SamplingParams(temperature=0, logit_bias={best: -100.0}))]).tokens != [best]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_ids_are_held_back_until_the_least_length(temperature: float) -> None:
    logits = random_logits(1)
    logits[0, 3] = logits[0, 9] = 60.0
    params = SamplingParams(temperature=temperature, min_new_tokens=2)
    for index, is_held in ((0, True), (1, True), (2, False)):
        token = sample(logits, [row(params, index=index, end_ids=(3, 9))]).tokens[0]
        assert (token not in (3, 9)) == is_held


def test_the_given_logits_stay_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.clone()
    params = SamplingParams(temperature=0.5, logit_bias={1: 9.0}, repetition_penalty=2.0, top_p=0.5)
    sample(logits, [row(params, tokens=[1, 2], num_prompt=1)] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    rows = [row(SamplingParams(temperature=temperature, logprobs=2), seed=seed) for seed in range(3)]
    healthy = sample(logits, rows)
    logits[1, 77] = bad
    result = sample(logits, rows)
    assert list(result.errors) == [1] and "finite" in result.errors[1]
    assert result.tokens == [healthy.tokens[0], -1, healthy.tokens[2]]
    assert result.logprobs == [healthy.logprobs[0], None, healthy.logprobs[2]]


def test_a_row_of_minus_infinity_fails_alone() -> None:
    logits = random_logits(2)
    logits[0] = -math.inf
    assert list(sample(logits, [row(SamplingParams(temperature=1.0))] * 2).errors) == [0]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=0.2, top_k=2, logit_bias={4: 100.0}, logprobs=3)
    result = sample(logits, [row(params)])
    expected = torch.log_softmax(logits[0], -1)
    entry = result.logprobs[0]
    assert entry is not None and result.tokens == [4]
    assert entry.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_each_row_gets_its_own_number_of_alternatives() -> None:
    rows = [row(SamplingParams(temperature=0, logprobs=count)) for count in (-1, 0, 2, 5, 10 * VOCAB_SIZE)]
    found = sample(random_logits(5), rows).logprobs
    assert found[0] is None
    assert [len(entry.top) for entry in found[1:] if entry is not None] == [0, 2, 5, VOCAB_SIZE]


def test_each_row_gets_the_logprobs_of_its_own_ids() -> None:
    logits = random_logits(3)
    expected = torch.log_softmax(logits.double(), -1)
    asked = [(7, 0, 7), (), (1,)]
    rows = [row(SamplingParams(temperature=0, logprobs=1, logprob_ids=ids)) for ids in asked]
    for index, entry in enumerate(sample(logits, rows).logprobs):
        assert entry is not None
        assert entry.of_ids == pytest.approx([float(expected[index, token]) for token in asked[index]], abs=1e-5)


def test_logprobs_of_half_precision_are_computed_in_full() -> None:
    logits = random_logits(1).bfloat16()
    expected = torch.log_softmax(logits[0].double(), -1)
    assert token_logprobs(logits, [3], [0], [()])[0].logprob == pytest.approx(float(expected[3]), abs=1e-5)


def test_prompt_logits_are_bounded() -> None:
    assert rows_at_once(49152) * 49152 * 4 <= 64 * 2**20
    assert rows_at_once(10**9) == 1
