"""Texts that must have a form: types, patterns, grammars and schemas, on every backend that can bind them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

import sgray as sgl
from sgray.errors import InvalidRequestError


class Place(BaseModel):
    name: Literal["Reims", "Berlin"]
    rivers: int = Field(ge=0, le=9)


@sgl.function
def typed(s):
    s += "Seven days make a week. Days in a week: " + sgl.gen_int("days", max_tokens=4)
    s += ". Weight: " + sgl.gen("weight", dtype=float, max_tokens=6)
    s += ". Is water wet? " + sgl.gen("wet", dtype=bool, max_tokens=4)
    s += '. {"name": ' + sgl.gen_string("name", max_tokens=8) + "}"


@sgl.function
def asks(s, expression):
    s += sgl.user("When did the second world war end, and where was it signed? Be short.")
    s += sgl.assistant(expression)


def test_a_variable_holds_the_value_and_the_text_what_was_written(backend: sgl.Engine) -> None:
    state = typed.run(temperature=0)
    assert isinstance(state["days"], int) and isinstance(state["weight"], float) and isinstance(state["wet"], bool)
    assert isinstance(state["name"], str) and state.text().count('"') >= 3
    assert re.search(r"week: [-+]?\d+\. Weight: [-+]?\d+(\.\d+)?\. Is water wet\? (True|False)\. ", state.text())


def test_a_pattern_and_a_grammar_bind_the_text(backend: sgl.Engine) -> None:
    state = asks.run(expression=sgl.gen("date", regex=r"\d{4}-\d{2}-\d{2}", max_tokens=16), temperature=0)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", state["date"])
    state = asks.run(expression=sgl.gen("word", ebnf='root ::= "Reims" | "Berlin"', max_tokens=8), temperature=0)
    assert state["word"] in ("Reims", "Berlin")


@pytest.mark.parametrize("schema", [Place, Place.model_json_schema(), json.dumps(Place.model_json_schema())])
def test_a_schema_may_be_a_model_a_dictionary_or_json(backend: sgl.Engine, schema) -> None:
    expression = sgl.gen("place", json_schema=schema, max_tokens=40)
    Place.model_validate_json(asks.run(expression=expression, temperature=0)["place"])


def test_the_same_schema_over_http_and_on_an_openai_endpoint(
    engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint, openai: sgl.OpenAI
) -> None:
    expression = sgl.gen("place", json_schema=Place, max_tokens=24)
    found = [asks.run(expression=expression, temperature=0, backend=one)["place"] for one in (engine, endpoint, openai)]
    assert found[0] == found[1] == found[2]


def test_a_schema_that_cannot_be_bound_is_an_error_of_its_own_branch(backend: sgl.Engine) -> None:
    @sgl.function
    def one_is_bad(s):
        forks = s.fork(2)
        forks[0] += "x" + sgl.gen("a", json_schema={"type": "nonsense"}, max_tokens=4)
        forks[1] += "x" + sgl.gen("a", max_tokens=4)
        return forks

    forks = one_is_bad.run(temperature=0).return_value
    assert isinstance(forks[0].error(), InvalidRequestError)
    assert forks[1].error() is None and isinstance(forks[1]["a"], str)


def test_the_example_extracts_a_person(engine: sgl.Engine) -> None:
    path = Path(__file__).parents[2] / "examples" / "json_extraction.py"
    spec = importlib.util.spec_from_file_location("json_extraction", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.main(engine).born, int)


def test_reasoning_stands_apart_from_the_answer(backend: sgl.Engine) -> None:
    @sgl.function
    def thinks(s):
        s += sgl.user("Think.")
        s += sgl.assistant(
            sgl.separate_reasoning(
                sgl.gen("answer", regex=r"<think>[a-z]{3}</think>\n\n[0-9]{2}", max_tokens=40), model_type="qwen3"
            )
        )

    state = thinks.run(temperature=0)
    assert re.fullmatch(r"[a-z]{3}", state["answer_reasoning_content"])
    assert re.fullmatch(r"[0-9]{2}", state["answer"])
    assert state.messages()[-1]["content"] == state["answer"]
    with pytest.raises(ValueError, match="qwen3-thinking"):
        sgl.separate_reasoning(sgl.gen("x"), model_type="other")
