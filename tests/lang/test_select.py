"""Choices: what is chosen, by which rule, and at what cost."""

from __future__ import annotations

import pytest

import sgray as sgl
from sgray.lang.choices import ChoicesDecision
from sgray.lang.native import NativeBackend


@sgl.function
def chooses(s, before, choices, method=None):
    s += before + sgl.select("x", choices=choices, choices_method=method)


METHODS = [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_likely_choice_wins_by_every_rule(small: sgl.Engine, method) -> None:
    question = "Q: What is the capital of France?\nA: The capital is"
    state = chooses.run(before=question, choices=[" Berlin", " Paris", " Rome"], method=method)
    assert state["x"] == " Paris"
    assert state.text() == question + " Paris"
    assert len(state.get_meta_info("x")["normalized_prompt_logprobs"]) == 3


@pytest.mark.parametrize("choices", [["yes", "no"], ["a", "ab", "abc"], ["only"], ["a b c", "a"]])
@pytest.mark.parametrize("before", ["Answer: ", "Is it so? ", ""])
def test_pub_117_one_of_the_choices_is_taken_and_always_the_same(
    backend: sgl.Engine, before: str, choices: list[str]
) -> None:
    chosen = {chooses.run(before=before, choices=choices, method=method)["x"] for method in METHODS[:1] * 2}
    assert len(chosen) == 1 and chosen <= {*choices}
    for method in METHODS[1:]:
        assert chooses.run(before=before, choices=choices, method=method)["x"] in choices


@pytest.mark.parametrize("choices", [[], None, "yes", ["yes", ""], ["yes", 7]])
def test_pub_117_choices_that_are_none_are_refused_at_once(choices) -> None:
    with pytest.raises(ValueError, match="choice"):
        sgl.select("x", choices=choices)


def test_a_temperature_is_refused(backend: sgl.Engine) -> None:
    with pytest.raises(ValueError, match="temperature"):
        sgl.select("x", ["a"], temperature=0.7)
    with pytest.raises(ValueError, match="temperature"):
        sgl.gen("x", choices=["a"], temperature=0.7)


def test_all_choices_are_one_call_on_the_cached_prefix(backend: sgl.Engine) -> None:
    calls = []
    transport = backend.backend.transport

    class Counting:
        def __getattr__(self, name):
            return getattr(transport, name)

        async def call(self, name, body):
            calls.append((name, body))
            return await transport.call(name, body)

    counted = NativeBackend(Counting(), backend.loop)
    before = "A text of some length that stands before the choices and has been computed before. " * 6
    sgl.function(lambda s: s.__iadd__(before + sgl.gen(max_tokens=1))).run(temperature=0)
    cached = backend.get_server_info()["internal_states"][0]["cached_tokens"]
    choices = [" one", " two", " three and a half", " three"]
    state = chooses.run(before=before, choices=choices, backend=counted)
    (body,) = [body for name, body in calls if name == "generate"]
    assert len(body["input_ids"]) == 1, "three choices need one distribution, and the fourth goes on behind a token"
    shared = body["logprob_start_len"]
    assert backend.get_server_info()["internal_states"][0]["cached_tokens"] - cached >= shared - 16
    plain = backend.generate(
        [before + choice for choice in choices],
        {"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=shared,
    )
    expected = [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] for answer in plain]
    found = [[entry[0] for entry in entries] for entries in state.get_meta_info("x")["input_token_logprobs"]]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_select_inside_a_message(backend: sgl.Engine) -> None:
    @sgl.function
    def judges(s):
        s += sgl.user("Is Paris in France? Say yes or no.")
        s += sgl.assistant("Answer: " + sgl.gen("x", choices=["yes", "no"]))

    state = judges.run()
    assert state["x"] in ("yes", "no")
    assert state.text().endswith(f"<|im_start|>assistant\nAnswer: {state['x']}<|im_end|>\n")


def test_a_rule_of_the_users_own(backend: sgl.Engine) -> None:
    class Last:
        requires_unconditional_logprobs = True

        def __call__(self, *, choices, unconditional_token_logprobs, **scores):
            assert [len(entries) for entries in unconditional_token_logprobs] == [
                len(entries) for entries in scores["input_token_logprobs"]
            ]
            return ChoicesDecision(choices[-1], {"why": "it is the last"})

    state = chooses.run(before="Say ", choices=["a", "b c"], method=Last())
    assert (state["x"], state.get_meta_info("x")) == ("b c", {"why": "it is the last"})


def test_greedy_choice_goes_token_by_token_and_a_short_one_on_with_its_mean() -> None:
    def entries(*logprobs):
        return [[value, 0, None] for value in logprobs]

    rows = [entries(-1.0, -9.0), entries(-2.0, -0.1), entries(-1.0)]
    means = [-5.0, -1.05, -1.0]
    decide = sgl.greedy_token_selection
    chosen = decide(
        choices=["first", "second", "third"],
        normalized_prompt_logprobs=means,
        input_token_logprobs=rows,
        output_token_logprobs=[],
    )
    assert chosen.decision == "third"
