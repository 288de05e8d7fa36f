"""Requests with a grammar, through a whole engine: what they yield, how they end, and that nothing else matters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from grammars import VOCAB_SIZE, Answer, asking, config_of, load_engine, run
from twins import make_twin

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.engine.grammar_queue import GrammarQueue
from sgray.errors import InvalidRequestError
from sgray.protocol import Finish, Grammar, Request
from sgray.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "old": {"type": "boolean"},
    },
    "required": ["name", "kind", "old"],
    "additionalProperties": False,
}
PERSON_GRAMMAR = Grammar("json_schema", json.dumps(PERSON))
YEAR = Grammar("regex", r"[0-9]{4}-[0-9]{2}")
LETTERS = Grammar("regex", "[a-z]*")


@pytest.fixture(scope="module")
def engine(grammar_model: Path, grammars: GrammarQueue) -> Engine:
    return load_engine(config_of(grammar_model), grammars)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("Tell me about a pet, in one line of JSON, with its name and its kind:")


def text(tokenizer: Tokenizer, answer: Answer) -> str:
    return tokenizer.decode(answer.tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 6}]
)
def test_an_answer_matches_its_schema(
    engine: Engine, tokenizer: Tokenizer, prompt: list[int], sampling: dict[str, object]
) -> None:
    answer = run(engine, [asking("a", prompt, PERSON_GRAMMAR, **sampling)])["a"]
    jsonschema.validate(json.loads(text(tokenizer, answer)), PERSON)
    assert answer.finish == Finish("stop"), "nothing but the end may follow, so no step is spent on it"


def test_every_kind_of_grammar_holds_in_one_batch(engine: Engine, tokenizer: Tokenizer, prompt: list[int]) -> None:
    tag = {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": PERSON},
        "end": "</call>",
    }
    answers = run(
        engine,
        [
            asking("schema", prompt, PERSON_GRAMMAR),
            asking("regex", prompt, YEAR),
            asking("ebnf", prompt, Grammar("ebnf", 'root ::= "yes" | "no, " [a-c]{3}')),
            asking("tag", prompt, Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag})), 8),
            asking("free", prompt, None, 5),
        ],
    )
    assert json.loads(text(tokenizer, answers["schema"])).keys() == PERSON["properties"].keys()  # type: ignore[attr-defined]
    assert re.fullmatch(r"\d{4}-\d{2}", text(tokenizer, answers["regex"]))
    assert re.fullmatch(r"yes|no, [a-c]{3}", text(tokenizer, answers["ebnf"]))
    assert text(tokenizer, answers["tag"]).startswith("<call>{")
    assert answers["free"].tokens == run(engine, [asking("free", prompt, None, 5)])["free"].tokens


def variety(prompt: list[int]) -> list[Request]:
    return [
        asking("json", prompt, PERSON_GRAMMAR, temperature=0.8, seed=1),
        asking("penalised", prompt[:9], PERSON_GRAMMAR, repetition_penalty=1.3, presence_penalty=0.2),
        asking("biased", prompt[3:], LETTERS, 12, logit_bias={2: -5.0, 100: 3.0}, temperature=1.0, seed=2),
        asking("scored", prompt, YEAR, logprobs=2),
        asking("free", prompt, None, 9),
        asking("later", [*prompt, 5], Grammar("regex", "[0-9]+", after=(30,)), 12, logit_bias={30: 9.0}),
    ]


def test_batched_is_alone_and_cached_is_uncached_and_overlapped_is_serial(
    grammar_model: Path, grammars: GrammarQueue, engine: Engine, prompt: list[int]
) -> None:
    together = {name: (a.tokens, a.finish) for name, a in run(engine, variety(prompt)).items()}
    alone = {}
    for request in variety(prompt):
        alone |= {name: (a.tokens, a.finish) for name, a in run(engine, [request]).items()}
    assert alone == together
    other = load_engine(config_of(grammar_model, chunked_prefill_size=8, max_running_requests=4), grammars, depth=1)
    assert {name: (a.tokens, a.finish) for name, a in run(other, variety(prompt)).items()} == together


def test_a_retracted_sequence_goes_on_in_its_grammar(
    grammar_model: Path, grammars: GrammarQueue, engine: Engine, prompt: list[int]
) -> None:
    tight = config_of(grammar_model).model_dump()
    tight["memory"]["max_total_tokens"] = 288
    cramped = load_engine(Config.parse(tight), grammars)
    words = Grammar("regex", "[a-z ]*")
    requests = [asking(f"r{i}", prompt[i:], words, 110, ignore_eos=True, temperature=1.0, seed=i) for i in range(4)]
    requests += [asking("json", prompt, PERSON_GRAMMAR)]
    found = run(cramped, requests)
    assert cramped.current_load().retracted > 0
    assert {n: a.tokens for n, a in found.items()} == {n: a.tokens for n, a in run(engine, requests).items()}


def test_forced_text_is_not_drawn_token_by_token(engine: Engine, tokenizer: Tokenizer, prompt: list[int]) -> None:
    jumped = run(engine, [asking("a", prompt, PERSON_GRAMMAR)])["a"]
    assert len(jumped.deltas) < len(jumped.tokens) - 4
    assert jumped.tokens[:3] == tokenizer.encode('{"name": "', add_special_tokens=False)[:3], "cut as in any text"
    scored = run(engine, [asking("a", prompt, PERSON_GRAMMAR, logprobs=0)])["a"]
    assert len(scored.deltas) == len(scored.tokens) and all(len(d.logprobs or []) == 1 for d in scored.deltas)


def test_a_constant_needs_no_step_at_all(engine: Engine, tokenizer: Tokenizer, prompt: list[int]) -> None:
    before = engine.current_load().steps
    answer = run(engine, [asking("a", prompt, Grammar("json_schema", '{"const": "always the same"}'))])["a"]
    assert text(tokenizer, answer) == '"always the same"' and answer.finish == Finish("stop")
    assert engine.current_load().steps == before
    cut = run(engine, [asking("a", prompt, Grammar("json_schema", '{"const": "always the same"}'), 2)])["a"]
    assert (len(cut.tokens), cut.finish) == (2, Finish("length"))


def test_an_end_is_drawn_only_where_the_grammar_is_complete(engine: Engine, prompt: list[int]) -> None:
    wanting = {"logit_bias": {2: 100.0}}
    assert run(engine, [asking("a", prompt, LETTERS, **wanting)])["a"].tokens == [2], "nothing is complete"
    year = run(engine, [asking("a", prompt, YEAR, **wanting)])["a"]
    assert 2 not in year.tokens and year.finish == Finish("stop")


def test_least_length_and_ignored_ends_do_not_keep_a_complete_grammar_going(
    engine: Engine, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    short = Grammar("regex", "a{1,3}")
    for sampling in ({"min_new_tokens": 30}, {"ignore_eos": True}, {"min_new_tokens": 9, "stop_token_ids": (64, 80)}):
        answer = run(engine, [asking("a", prompt, short, **sampling)])["a"]
        assert re.fullmatch("a{1,3}", text(tokenizer, answer)) and answer.finish == Finish("stop")
    bias = {"logit_bias": {2: 100.0}}
    held = run(engine, [asking("a", prompt, LETTERS, 12, min_new_tokens=5, **bias)])["a"]
    assert len(held.tokens) == 6 and held.finish == Finish("stop", matched=2)
    ignoring = run(engine, [asking("a", prompt, LETTERS, 7, ignore_eos=True, **bias)])["a"]
    assert len(ignoring.tokens) == 7 and 2 not in ignoring.tokens and ignoring.finish == Finish("length")


def test_special_tokens_are_no_text(engine: Engine, tokenizer: Tokenizer, prompt: list[int]) -> None:
    special = tokenizer.encode("<|im_start|>")[0]
    beyond = tokenizer.vocab_size + 3
    bias = {special: 100.0, beyond: 90.0, 0: 80.0}
    answer = run(engine, [asking("a", prompt, Grammar("json_schema", '{"type": "string"}'), 9, logit_bias=bias)])["a"]
    assert answer.tokens and not {special, beyond, 0} & set(answer.tokens)


def test_pub_023_rows_of_the_model_that_have_no_token_are_never_drawn(engine: Engine, prompt: list[int]) -> None:
    padding = dict.fromkeys(range(VOCAB_SIZE - 40, VOCAB_SIZE), 100.0)
    grammars = {"schema": PERSON_GRAMMAR, "regex": LETTERS, "free": None}
    answers = run(engine, [asking(name, prompt, one, 12, logit_bias=padding) for name, one in grammars.items()])
    assert max(answers["schema"].tokens + answers["regex"].tokens) < VOCAB_SIZE - 40
    assert min(answers["free"].tokens) >= VOCAB_SIZE - 40, "else nothing was tried"


def test_a_grammar_may_begin_behind_the_reasoning(engine: Engine, tokenizer: Tokenizer, prompt: list[int]) -> None:
    marker = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    assert len(marker) > 1
    free = run(engine, [asking("a", prompt, None, 6)])["a"].tokens
    late = run(engine, [asking("a", prompt, Grammar("regex", "[0-9]{2}", after=tuple(free[2:4])), 12)])["a"]
    assert late.tokens[:4] == free[:4], "until then it is as without a grammar"
    assert re.fullmatch("[0-9]{2}", tokenizer.decode(late.tokens[4:])) and late.finish == Finish("stop")
    never = run(engine, [asking("a", prompt, Grammar("regex", "[0-9]{2}", after=marker), 6)])["a"]
    assert never.tokens == free
    ended = run(engine, [asking("a", prompt, Grammar("regex", "x", after=marker), 6, logit_bias={2: 100.0})])["a"]
    assert ended.finish == Finish("stop", matched=2)


def test_logprobs_are_the_models_own(engine: Engine, prompt: list[int]) -> None:
    masked = run(engine, [asking("a", prompt, YEAR, 1, logprobs=3)])["a"].deltas[0].logprobs
    free = run(engine, [asking("a", prompt, None, 1, logprobs=3)])["a"].deltas[0].logprobs
    assert masked is not None and free is not None
    assert masked[0].top == free[0].top and masked[0].logprob < free[0].logprob


def test_without_a_tokenizer_a_grammar_is_refused(tmp_path: Path) -> None:
    config = config_of(make_twin(tmp_path)).model_dump()
    config["model"]["skip_tokenizer_init"] = True
    engine = Engine.load(Config.parse(config))
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        engine.add(asking("a", [5, 6], YEAR))
    assert not engine.has_work
