"""Plans to tokens. What is common to all: how the work is cut into steps and batches changes no result."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from steps import GREEDY, Driver, Running
from transformers import AutoModelForCausalLM
from twins import VOCAB_SIZE, make_twin, reference_logprobs, some_tokens

from sgray.engine.plan import StepPlan
from sgray.protocol import SamplingParams


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("twin"), "llama")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("windowed"), "mistral", sliding_window=24)


@pytest.fixture
def driver(twin: Path) -> Driver:
    return Driver.load(twin)


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    lengths = random.Random(3).choices(range(1, longest), k=count)
    return [some_tokens(length, seed=seed) for seed, length in enumerate(lengths)]


def alone(driver: Driver, prompt: list[int], sampling: SamplingParams, count: int, **changes: object) -> list[int]:
    return driver.generate([driver.start(prompt, sampling, **changes)], count)[0]


def test_greedy_tokens_are_those_of_transformers(driver: Driver, twin: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    prompt = some_tokens(20)
    tokens = torch.tensor([prompt])
    settings = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), suppress_tokens=None, **settings)
    ours = driver.start(prompt, SamplingParams(temperature=0, min_new_tokens=30), end_ids=(2,))
    assert driver.generate([ours], 30) == [expected[0, 20:].tolist()]


@pytest.mark.parametrize("directory", ["twin", "windowed"])
def test_last_rows_alone_have_the_scores_that_they_have_among_all(
    directory: str, request: pytest.FixtureRequest
) -> None:
    driver = Driver.load(request.getfixturevalue(directory))
    last, among_all = (
        SamplingParams(temperature=0, logprobs=VOCAB_SIZE),
        SamplingParams(temperature=0, logprobs=VOCAB_SIZE, prompt_logprobs=0),
    )
    found, expected = ([driver.start(prompt, asked) for prompt in prompts(5)] for asked in (last, among_all))
    driver.generate(found, 3, chunk=40)
    driver.generate(expected, 3, chunk=40)
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output
        tops = zip(one.logprobs, other.logprobs, strict=True)
        assert all(dict(mine.top) == pytest.approx(dict(wanted.top), abs=1e-5) for mine, wanted in tops)


@pytest.mark.parametrize("directory", ["twin", "windowed"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_batched_is_alone(directory: str, page_size: int, request: pytest.FixtureRequest) -> None:
    driver = Driver.load(request.getfixturevalue(directory), memory={"page_size": page_size})
    given = prompts(12)
    expected = [alone(driver, prompt, GREEDY, 20) for prompt in given]
    assert driver.generate([driver.start(prompt) for prompt in given], 20) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 24])
def test_batched_logprobs_are_those_alone_to_the_bit(tmp_path: Path, dtype: str, window: int | None) -> None:
    driver = Driver.load(make_twin(tmp_path, "mistral", head_dim=32, sliding_window=window), dtype)
    sampling = SamplingParams(temperature=0, logprobs=5)
    single = [driver.start(prompt, sampling) for prompt in prompts(6)]
    for sequence in single:
        driver.generate([sequence], 8)
    together = [driver.start(prompt, sampling) for prompt in prompts(6)]
    driver.generate(together, 8)
    assert [one.output for one in together] == [one.output for one in single]
    assert [one.logprobs for one in together] == [one.logprobs for one in single]


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 64])
def test_chunked_is_whole(driver: Driver, chunk: int) -> None:
    given = prompts(4)
    expected = driver.generate([driver.start(prompt) for prompt in given], 12)
    assert driver.generate([driver.start(prompt) for prompt in given], 12, chunk) == expected


def test_chunks_and_decodes_share_a_step(driver: Driver) -> None:
    first, second = prompts(2)[0], some_tokens(70, seed=9)
    expected = [alone(driver, first, GREEDY, 10), alone(driver, second, GREEDY, 4)]
    early, late = driver.start(first), driver.start(second)
    driver.generate([early], 3)
    for count in (30, 25, 15):
        driver.step([(late, count), (early, 1)])
    assert driver.generate([early, late], 4)[1] == expected[1]
    assert driver.generate([early], 10)[0] == expected[0]


@pytest.mark.parametrize("num_cached", [1, 15, 16, 17, 48])
def test_cached_is_uncached(driver: Driver, num_cached: int) -> None:
    """Another sequence's pages, the last of them copied where it is left half-way, serve as a prefix."""
    shared = some_tokens(48)
    donor = driver.start([*shared, 5, 6])
    driver.generate([donor], 1)
    prompt = [*shared[:num_cached], *some_tokens(20, seed=4)]
    expected = alone(driver, prompt, GREEDY, 10)
    reader = driver.start(prompt, num_computed=num_cached)
    whole, rest = divmod(num_cached, driver.info.page_size)
    num_pages = -(-len(prompt) // driver.info.page_size)
    fresh = list(range(driver.next_page, driver.next_page + num_pages - whole))
    driver.next_page += len(fresh)
    reader.pages = donor.pages[:whole] + fresh
    copies = [(donor.pages[whole], fresh[0])] if rest else []
    pages = [(reader.slot, place, page) for place, page in enumerate(reader.pages)]
    driver.step([(reader, len(prompt) - num_cached)], copies=copies, new_pages=pages)
    assert driver.generate([reader], 10) == [expected]


def test_a_retracted_sequence_goes_on_as_if_undisturbed(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, min_new_tokens=12)
    prompt = some_tokens(20)
    expected = alone(driver, prompt, sampling, 16, seed=11, end_ids=(2,))
    sequence = driver.start(prompt, sampling, seed=11, end_ids=(2,))
    driver.generate([sequence], 7)
    again = Running(90, sampling, 20, list(sequence.tokens), seed=11, end_ids=(2,))
    assert driver.generate([again], 16) == [expected]


def test_a_slot_forgets_its_former_owner(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5)
    first, second = prompts(2)
    expected = alone(driver, second, sampling, 8)
    alone(driver, first, sampling, 8)
    assert driver.generate([Running(driver.next_slot - 1, sampling, len(second), list(second))], 8) == [expected]


def test_a_seeded_draw_is_the_same_in_company_pub_059(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.8)
    prompt = some_tokens(10)
    expected = alone(driver, prompt, sampling, 16, seed=42)
    for seed in (1, 2):
        company = [driver.start(other, sampling, seed=seed + n) for n, other in enumerate(prompts(3))]
        together = [*company[:seed], driver.start(prompt, sampling, seed=42), *company[seed:]]
        assert driver.generate(together, 16)[seed] == expected
    assert alone(driver, prompt, sampling, 16, seed=43) != expected


def test_a_penalty_of_a_neighbour_changes_nothing_pub_108(driver: Driver) -> None:
    penalised = SamplingParams(temperature=0, repetition_penalty=1.8)
    prompt = some_tokens(12)
    expected = [alone(driver, prompt, sampling, 20) for sampling in (GREEDY, penalised)]
    assert expected[0] != expected[1]
    for order in ((0, 1), (1, 0)):
        together = [driver.start(prompt, (GREEDY, penalised)[which]) for which in order]
        assert driver.generate(together, 20) == [expected[which] for which in order]


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_prompt_logprobs_come_for_every_prompt_token_but_the_first_pub_050(
    driver: Driver, twin: Path, chunk: int
) -> None:
    prompt = some_tokens(30)
    asking, other = driver.start(prompt, SamplingParams(temperature=0, prompt_logprobs=2)), driver.start(prompt)
    driver.generate([other, asking], 3, chunk)
    expected = reference_logprobs(twin, prompt)
    assert len(asking.prompt_logprobs) == 29 and other.prompt_logprobs == []
    for position, entry in enumerate(asking.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=2e-4)
        assert [token for token, _ in entry.top] == expected[position].topk(2).indices.tolist()


def test_prompt_logprobs_in_pieces_are_the_same(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=0, prompt_logprobs=3)
    whole, pieces = driver.start(some_tokens(40), sampling), driver.start(some_tokens(40), sampling)
    driver.generate([whole], 1)
    monkeypatch.setattr("sgray.engine.sampler.MAX_LOGITS_BYTES", 7 * VOCAB_SIZE * 4)
    driver.generate([pieces], 1)
    assert pieces.prompt_logprobs == whole.prompt_logprobs


def test_a_sequence_that_does_not_sample_gives_no_token(driver: Driver) -> None:
    result = driver.step([(driver.start(some_tokens(20)), 10)])
    assert (result.tokens, result.logprobs, result.errors) == ([-1], [None], {})


def test_an_empty_plan_only_prepares(driver: Driver) -> None:
    driver.executor.submit(StepPlan(step=7, copies=[(0, 1)]))
    result = driver.executor.collect()
    assert (result.step, result.tokens, result.logprobs, result.prompt_logprobs) == (7, [], [], [])


def test_a_broken_sequence_fails_alone_and_leaves_no_trace(tmp_path: Path) -> None:
    """One id embeds as NaN: its sequence fails, its batch-mates and the next owners of its pages do not."""
    make_twin(tmp_path)
    driver = Driver.load(tmp_path)
    given = prompts(3)
    expected = driver.generate([driver.start(prompt) for prompt in given], 20)
    used = {token for tokens in [*given, *expected] for token in tokens}
    bad = next(token for token in range(VOCAB_SIZE) if token not in used)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][bad] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    driver = Driver.load(tmp_path)
    broken = driver.start([*[5] * 40, bad, 5])
    driver.generate([broken], 5)
    assert broken.error is not None and "finite" in broken.error
    driver.next_page = 0
    together = [driver.start(prompt) for prompt in given]
    mixed = [together[0], driver.start([bad, 9, 9]), *together[1:]]
    driver.generate(mixed, 20)
    assert mixed[1].error is not None
    assert [one.output for one in together] == expected


@pytest.mark.parametrize("seed", range(3))
def test_random_interleavings_change_nothing(driver: Driver, seed: int) -> None:
    source = random.Random(seed)
    given = prompts(6, longest=60)
    expected = [alone(driver, prompt, GREEDY, 10) for prompt in given]
    sequences = [driver.start(prompt) for prompt in given]
    while unfinished := [one for one in sequences if len(one.output) < 10]:
        chosen = source.sample(unfinished, source.randint(1, len(unfinished)))
        driver.step([(one, source.randint(1, len(one.tokens) - one.num_computed)) for one in chosen])
    assert [one.output for one in sequences] == expected
