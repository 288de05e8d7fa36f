"""An answer that another engine began goes on here exactly as it would have gone on there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_model import Output, Rig, solo
from grammars import Answer, asking, config_of, load_engine, run

from sgray.engine.engine import Engine
from sgray.engine.grammar_queue import GrammarQueue
from sgray.errors import ContextLengthError, InvalidRequestError
from sgray.protocol import NO_LOGPROBS, Finish, Grammar, Request, SamplingParams, TokenLogprobs
from sgray.text.tokenizer import Tokenizer

PET = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["cat", "dog"]}},
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
    ),
)
END = 2


@pytest.fixture(scope="module")
def first(grammar_model: Path, grammars: GrammarQueue) -> Engine:
    return load_engine(config_of(grammar_model), grammars)


@pytest.fixture(scope="module", params=[0, 1], ids=["serial", "overlapped"])
def second(request: pytest.FixtureRequest, grammar_model: Path, grammars: GrammarQueue) -> Engine:
    return load_engine(config_of(grammar_model, chunked_prefill_size=8), grammars, depth=request.param)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("Tell me about a pet, in one line of JSON:")


def rest_of(request: Request, answer: Answer, num_deltas: int) -> Request:
    """The request for what comes after so many deltas, in any other engine."""
    had = [token for delta in answer.deltas[:num_deltas] for token in delta.tokens]
    return replace(request, id="rest", tokens=request.tokens + had, num_generated=len(had))


def values(logprobs: list[TokenLogprobs]) -> list[float]:
    return [value for one in logprobs for value in (one.logprob, *(best for _, best in one.top), *one.of_ids)]


def logprobs_of(answer: Answer, num_deltas: int = 0) -> list[TokenLogprobs]:
    return [one for delta in answer.deltas[num_deltas:] for one in delta.logprobs or []]


CALLS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "narrow": {"temperature": 1.3, "seed": 8, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "penalised and seeded": {"temperature": 0.9, "seed": 9, "frequency_penalty": 1.5, "repetition_penalty": 0.9},
    "scored": {"logprobs": 3, "logprob_ids": (5, 6), "temperature": 1.0, "seed": 3},
    "at least": {"min_new_tokens": 9, "logit_bias": {END: 100.0}},
    "at least and stopped": {"min_new_tokens": 5, "stop_token_ids": (77,), "logit_bias": {77: 100.0}},
    "without end": {"ignore_eos": True, "logit_bias": {END: 100.0}},
}
GRAMMARS = {
    "json": PET,
    "regex": Grammar("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2} [a-z]{3,9}"),
    "later": Grammar("regex", "[0-9]{9}", after=(30, 30)),
}


def assert_continued(first: Engine, second: Engine, request: Request) -> None:
    """Cut after any delta, what the other engine adds is what was missing."""
    whole = run(first, [request])["a"]
    assert len(whole.deltas) > 3, "else nothing is cut"
    for cut in range(1, len(whole.deltas), 1 if len(whole.deltas) < 10 else 4):
        had = sum(len(delta.tokens) for delta in whole.deltas[:cut])
        second.flush()
        rest = run(second, [rest_of(request, whole, cut)])["rest"]
        assert (rest.tokens, rest.finish) == (whole.tokens[had:], whole.finish), cut
        mine, theirs = logprobs_of(rest), logprobs_of(whole, cut)
        assert values(mine) == pytest.approx(values(theirs), rel=1e-4)
        assert [[token for token, _ in one.top] for one in mine] == [[token for token, _ in one.top] for one in theirs]


@pytest.mark.parametrize("name", CALLS)
def test_continued_is_undisturbed(first: Engine, second: Engine, prompt: list[int], name: str) -> None:
    assert_continued(first, second, asking("a", prompt, None, 18, **CALLS[name]))


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 5}, {"logprobs": 1}, {"presence_penalty": 1.0, "min_new_tokens": 12}],
    ids=["greedy", "seeded", "scored", "penalised"],
)
def test_continued_in_its_grammar_is_undisturbed(
    first: Engine, second: Engine, prompt: list[int], name: str, sampling: dict[str, object]
) -> None:
    bias = {"logit_bias": {30: 30.0}} if name == "later" else {}
    assert_continued(first, second, asking("a", prompt, GRAMMARS[name], 24, **sampling, **bias))


def test_several_answers_to_one_prompt_go_on_each_for_itself(first: Engine, second: Engine, prompt: list[int]) -> None:
    several = [asking(f"{seed}", prompt, None, 20, temperature=1.0, seed=seed) for seed in range(4)]
    whole = run(first, several)
    assert len({tuple(answer.tokens) for answer in whole.values()}) == 4
    rests = [replace(rest_of(one, whole[one.id], 3 + 4 * index), id=one.id) for index, one in enumerate(several)]
    found = run(second, rests)
    for index, one in enumerate(several):
        assert whole[one.id].tokens[: 3 + 4 * index] + found[one.id].tokens == whole[one.id].tokens


def test_it_can_go_on_again_and_again(first: Engine, second: Engine, prompt: list[int]) -> None:
    request = asking("a", prompt, None, 20, temperature=1.0, seed=1, presence_penalty=1.0)
    whole = run(first, [request])["a"]
    once = rest_of(request, whole, 4)
    answer = run(second, [once])["rest"]
    twice = rest_of(once, answer, 5)
    assert run(first, [replace(twice, num_generated=9)])["rest"].tokens == whole.tokens[9:]


# ---- on the model that watches the pages


def continue_on(rig: Rig, id: str, prompt: list[int], had: list[int], **sampling: object) -> Output:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    rig.scheduler.add(Request(id, prompt + had, params, num_generated=len(had)))
    rig.outputs[id] = Output()
    return rig.outputs[id]


PROMPT = list(range(100, 130))


@pytest.mark.parametrize("depth", [0, 1])
def test_only_the_rest_is_told_and_lengths_mean_the_whole_answer(depth: int) -> None:
    whole = solo(PROMPT, 20)
    rig = Rig(depth=depth, context=50)
    output = continue_on(rig, "a", PROMPT, whole[:7], max_new_tokens=20, logprobs=0)
    rig.run()
    assert (output.tokens, output.finish) == (whole[7:], Finish("length"))
    load = rig.scheduler.load()
    assert (load.prompt_tokens, load.generation_tokens) == (37, 13)


def test_an_answer_that_lacks_nothing_ends_at_once() -> None:
    rig = Rig()
    output = continue_on(rig, "a", PROMPT, solo(PROMPT, 5), max_new_tokens=5)
    rig.run()
    assert (output.tokens, output.finish, rig.executor.num_computed) == ([], Finish("length"), 0)


def test_prompt_logprobs_are_the_prompts_alone() -> None:
    rig = Rig()
    had = solo(PROMPT, 6)
    output = continue_on(rig, "a", PROMPT, had, max_new_tokens=9, prompt_logprobs=0)
    rig.run()
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    without = continue_on(rig, "b", PROMPT, had, max_new_tokens=9, prompt_logprobs=NO_LOGPROBS)
    rig.run()
    assert without.prompt_logprobs is None and without.tokens == output.tokens


def test_what_has_begun_is_neither_refused_for_a_full_queue_nor_waits_behind_it() -> None:
    rig = Rig(max_running=1, max_queued=2)
    rig.add("runs", PROMPT, max_new_tokens=4)
    rig.step()
    rig.add("waits", PROMPT[1:], max_new_tokens=4)
    rig.add("waits too", PROMPT[2:], max_new_tokens=4)
    output = continue_on(rig, "begun", PROMPT[3:], solo(PROMPT[3:], 2), max_new_tokens=4)
    rig.step()
    while not output.deltas:
        rig.step()
    assert rig.outputs["runs"].finish is not None and not rig.outputs["waits"].deltas
    rig.run()


def test_what_was_begun_must_be_an_answer_to_something() -> None:
    rig = Rig(context=40)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        rig.scheduler.add(Request("a", [5, 6], SamplingParams(), num_generated=2))
    with pytest.raises(ContextLengthError, match="the prompt has 30 tokens and 11 more"):
        continue_on(rig, "a", PROMPT, [1] * 5, max_new_tokens=11)
