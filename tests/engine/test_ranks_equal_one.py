"""Ranks that share a model draw the tokens that one rank draws, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import Driver, Running
from thread_ranks import ThreadRanks
from twins import CONFIGS, EXPERTS, make_twin, reference_logprobs, some_tokens

from sgray.config import Config
from sgray.protocol import SamplingParams

# Four ranks need four query heads each holds one of; with two key-value heads, pairs of ranks hold the same one.
SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
CHANGES: dict[str, dict[str, Any]] = {"llama": {"attention_bias": True, "mlp_bias": True}}
WISHES = (
    SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: 2.5}),
    SamplingParams(temperature=1.0, logprobs=2, logprob_ids=(5, 99)),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_twin(tmp_path_factory.mktemp(family), family, **SIZES, **CHANGES.get(family, {}))
        for family in CONFIGS
    }


def ranks_on(model_dir: Path, size: int, **sections: dict[str, Any]) -> Iterator[Driver]:
    executor, info = ThreadRanks.load(model_dir, size, **sections)
    with closing(executor):
        yield Driver(executor, info)


def work(driver: Driver, chunk: int) -> list[Running]:
    """Prompts of several lengths, run together."""
    running = [
        driver.start(some_tokens(9 + 14 * number, number), wish, seed=number) for number, wish in enumerate(WISHES)
    ]
    driver.generate(running, 8, chunk)
    return running


def assert_alike(found: list[Running], expected: list[Running]) -> None:
    """The same tokens, and log-probabilities as near as two orders of adding are."""
    for mine, alone in zip(found, expected, strict=True):
        assert mine.output == alone.output
        for entries, others in (
            (mine.logprobs, alone.logprobs),
            (mine.prompt_logprobs, alone.prompt_logprobs),
        ):
            assert [one.logprob for one in entries] == pytest.approx([one.logprob for one in others], abs=1e-3)
            assert [[token for token, _ in one.top] for one in entries] == [
                [token for token, _ in one.top] for one in others
            ]
            assert [value for one in entries for value in one.of_ids] == pytest.approx(
                [value for one in others for value in one.of_ids], abs=1e-3
            )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_and_logprobs_are_those_of_one_rank(twins: dict[str, Path], family: str, size: int) -> None:
    expected = work(Driver.load(twins[family]), 16)
    for driver in ranks_on(twins[family], size):
        assert_alike(work(driver, 16), expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", EXPERTS)
def test_ranks_with_whole_experts_give_the_same(twins: dict[str, Path], family: str, size: int) -> None:
    expected = work(Driver.load(twins[family]), 16)
    for driver in ranks_on(twins[family], size, parallel={"ep_size": size}):
        assert_alike(work(driver, 16), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_a_bias_of_the_summed_layers_counts_once(tmp_path: Path, size: int) -> None:
    """With biases of all layers that are large, a second one would be seen against transformers itself."""
    model = make_twin(
        tmp_path,
        attention_bias=True,
        mlp_bias=True,
        num_attention_heads=6,
        num_key_value_heads=3 if size == 3 else 2,
        intermediate_size=48,
    )
    tokens = some_tokens(30)
    for driver in ranks_on(model, size):
        torch.testing.assert_close(
            driver.logprobs_everywhere(tokens, 7), reference_logprobs(model, tokens), atol=2e-3, rtol=0
        )


@pytest.mark.parametrize("size, tied", [(2, True), (4, False)])
def test_pub_143_a_vocabulary_that_does_not_divide_is_padded_and_padding_never_drawn(
    tmp_path: Path, size: int, tied: bool
) -> None:
    """Every id is as good as every other, and the last ones are wished for; none beyond the vocabulary comes."""
    model = make_twin(tmp_path, **SIZES, vocab_size=103, tie_word_embeddings=tied, initializer_range=0.01)
    wishes = (
        SamplingParams(temperature=1.0, logprobs=103),
        SamplingParams(temperature=0.0, logit_bias={102: 100.0}),
        SamplingParams(temperature=1.0, top_k=103, logit_bias={101: 4.0, 102: 4.0}),
    )

    def draw(driver: Driver) -> list[Running]:
        running = [driver.start(some_tokens(5, number), wish, seed=number) for number, wish in enumerate(wishes)]
        driver.generate(running, 20)
        return running

    alone = draw(Driver.load(model))
    for driver in ranks_on(model, size):
        mine = draw(driver)
        assert [one.output for one in mine] == [one.output for one in alone]
        assert mine[1].output == [102] * 20
        assert all(0 <= token < 103 for one in mine for token in one.output)
        assert all({token for token, _ in entry.top} == set(range(103)) for entry in mine[0].logprobs)


def test_ranks_hold_their_parts_and_no_more(twins: dict[str, Path]) -> None:
    """Half of the key-value heads with as many ranks as heads, one with more; as many pages on every rank."""
    for size, num_heads in ((2, 1), (4, 1)):
        executor, _ = ThreadRanks.load(twins["llama"], size)
        with closing(executor):
            assert {pool.shape.num_kv_heads for pool in executor.pools} == {num_heads}
            assert {len(pool.pages) for pool in executor.pools} == {4096 // 16}


def test_ranks_of_different_free_memory_agree_on_the_pages(
    twins: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.parse({"model": {"model_path": str(twins["llama"]), "dtype": "float32", "device": "cpu"}})
    free = iter([2**30, 2**26, 2**25])  # of the process when it is asked at first, and then of each rank
    monkeypatch.setattr("sgray.engine.executor.free_memory_bytes", lambda _: next(free))
    with closing(ThreadRanks(config, twins["llama"], 2)) as executor:
        page_bytes = executor.pools[0].shape.page_bytes
        assert {len(pool.pages) for pool in executor.pools} == {2**25 // 4 // 2 // page_bytes}
