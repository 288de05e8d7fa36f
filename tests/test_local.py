from __future__ import annotations

from pathlib import Path

import pytest

from sgray.config import Config
from sgray.errors import InvalidRequestError
from sgray.local import LocalModel
from sgray.protocol import SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LocalModel:
    model = {"model_path": str(model_dir), "device": "cpu", "dtype": "float32"}
    return LocalModel.load(Config.parse({"model": model, "memory": {"max_total_tokens": 1024}}))


def test_a_chat_is_answered_without_the_end_mark(model: LocalModel) -> None:
    assert "".join(model.chat(QUESTION, GREEDY)) == "The capital of France is Paris."


def test_a_text_is_continued(model: LocalModel) -> None:
    assert "Paris" in "".join(model.complete("The capital of France is the city of", GREEDY))


def test_an_answer_that_its_reader_leaves_does_not_reach_the_next_one(model: LocalModel) -> None:
    expected = "".join(model.chat(QUESTION, GREEDY))
    left = model.complete("Count: one, two, three,", SamplingParams(max_new_tokens=64, temperature=0.0))
    next(left)
    left.close()
    assert "".join(model.chat(QUESTION, GREEDY)) == expected


def test_a_seed_repeats_a_draw(model: LocalModel) -> None:
    drawn = SamplingParams(max_new_tokens=12, temperature=1.5, seed=7)
    assert "".join(model.complete("Once", drawn)) == "".join(model.complete("Once", drawn))


def test_a_prompt_that_does_not_fit_is_refused(model: LocalModel) -> None:
    with pytest.raises(InvalidRequestError):
        list(model.complete("word " * 9000, GREEDY))
