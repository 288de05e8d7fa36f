"""Every example of the language runs on the small model, with few tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import sgray as sgl

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_best_of_several_answers(engine: sgl.Engine) -> None:
    assert load("best_of_n").main(engine, n=2, max_tokens=4).strip()


def test_a_tree_of_thought_ends_with_an_answer(engine: sgl.Engine) -> None:
    assert load("tree_of_thought").main(engine, max_tokens=2).strip()


def test_an_agent_calls_its_tools_and_goes_on_from_what_they_say(engine: sgl.Engine) -> None:
    example = load("react_agent")
    course = example.main(engine, max_steps=2)
    observed = [line for line in course.splitlines() if line.startswith("Observation: ")]
    assert observed and all(line.removeprefix("Observation: ").isdecimal() for line in observed)
    assert course.splitlines()[0] == "How many millions live in France and Germany?"
    assert course.splitlines()[-1].startswith("Answer:")
    assert example.call("calculator", "68 + 83") == "151"


def test_reviews_are_classified(engine: sgl.Engine) -> None:
    assert load("few_shot_classification").main(engine) == ["positive", "negative", "positive"]


def test_a_conversation_has_all_its_turns(engine: sgl.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    messages = load("multi_turn_chat").main(engine, max_tokens=4)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 3]
    assert messages[2]["content"] in capsys.readouterr().out
