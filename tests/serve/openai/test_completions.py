"""Text completions: prompts in every form, echo, logprobs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def test_the_openai_client_reads_answers_and_streams(client):
    fields = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 3}
    answer = await client.completions.create(**fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (", a world", "length")
    assert answer.usage.completion_tokens == 3
    chunks = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ", a world"


async def test_a_prompt_comes_as_text_ids_texts_or_lists_of_ids(api, backend):
    forms = [("Hello world", 1), ([19556, 905], 1), (["Hello world", "Hello"], 2), ([[19556, 905], [19556]], 2)]
    for prompt, count in forms:
        answer = await api.answer(PATH, prompt=prompt)
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    assert [request.tokens for request in backend.requests] == [[19556, 905]] * 2 + [[19556, 905], [19556]] * 2


async def test_choices_are_ordered_by_prompt_then_n_and_prompts_count_once(api, backend):
    answer = await api.answer(PATH, prompt=["Hello", "Hello world"], n=2, seed=7, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    by_id = sorted(backend.requests, key=lambda request: request.id)
    assert [(len(request.tokens), request.sampling.seed) for request in by_id] == [(1, 7), (1, 8), (2, 7), (2, 8)]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
async def test_pub_067_an_empty_prompt_is_refused(api, prompt):
    assert (await api.refused(PATH, prompt=prompt))["param"] == "prompt"
    assert (await api.post(PATH)).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([49152], "49152"),
        ([-1], "-1"),
        ([1, 99999999999], "99999999999"),
        ([1, 10**400], "prompt[1]"),
        ([1.5, 2], "1.5"),
        ([True], "boolean"),
        (["a", [1, 2]], "prompt[1]"),
        ([[1, 2], "a"], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([None], "null"),
        ([[[1]]], "prompt[0][0]"),
        ({"a": 1}, "object"),
        (5, "integer"),
        (True, "boolean"),
        ("\ud800", "surrogate"),
        (["a", "\udc00"], "prompt[1]"),
        (..., "prompt"),
        (None, "prompt"),
    ],
)
async def test_pub_068_a_wrong_prompt_is_named(api, prompt, named):
    error = await api.refused(PATH, prompt=prompt)
    assert error["param"] == "prompt"
    assert named in error["message"]


async def test_too_many_prompts_are_refused(api):
    assert (await api.refused(PATH, prompt=["a"] * 257))["param"] == "prompt"
    assert (await api.refused(PATH, prompt=["a"] * 200, n=2))["param"] == "n"


async def test_echo_puts_the_prompt_before_the_text(api):
    assert await api.texts(PATH, echo=True, max_tokens=2) == ("length:Hello world, a",) * 2
    assert await api.texts(PATH, echo=True, max_tokens=0) == ("length:Hello world",) * 2
    assert await api.texts(PATH, echo=True, max_tokens=1, prompt=[19556, 905]) == ("length:Hello world,",) * 2
    assert await api.texts(PATH, echo=True, max_tokens=4, stop=["world"]) == ("stop:Hello world, a ",) * 2


@pytest.mark.parametrize("logprobs", [0, 1, 5])
async def test_pub_049_echo_with_logprobs_has_an_entry_for_each_token(api, logprobs):
    choice = (await api.answer(PATH, echo=True, logprobs=logprobs, max_tokens=1))["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"] == ["Hello", " world", ","]
    assert found["token_logprobs"] == [None, -0.25, -0.25]
    assert found["text_offset"] == [0, 5, 11]
    if logprobs:
        assert found["top_logprobs"][0] is None
        assert all(len(top) <= logprobs + 1 for top in found["top_logprobs"][1:])
    else:
        assert found["top_logprobs"] is None


async def test_echo_with_logprobs_and_no_new_tokens(api, backend):
    choice = (await api.answer(PATH, echo=True, logprobs=1, max_tokens=0))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello world", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert backend.requests[0].sampling.max_new_tokens == 1


async def test_streamed_logprobs_equal_whole_ones(api, backend):
    backend.script = [28, 10813, 178, 239, 230, 905]
    for fields in ({"echo": True}, {}, {"stop": ["orldx"]}):
        fields |= {"logprobs": 2, "max_tokens": 12}
        whole = (await api.answer(PATH, **fields))["choices"][0]["logprobs"]
        joined = {name: [] for name in whole}
        for event in await api.events(PATH, **fields):
            for choice in event["choices"]:
                for name, values in choice["logprobs"].items():
                    joined[name] += values
        assert joined == whole


async def test_pub_053_logprobs_zero_gives_the_chosen_tokens_value(api):
    choice = (await api.answer(PATH, logprobs=0))["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-0.25] * 4
    assert choice["logprobs"]["text_offset"] == [0, 1, 3, 9]


async def test_pub_052_the_body_is_strict_json(api):
    choice = (await api.answer(PATH, logprobs=5))["choices"][0]
    assert all(value > -10000 for top in choice["logprobs"]["top_logprobs"] for value in top.values())


@pytest.mark.parametrize("value", [21, -1, 2.5, True, "1"])
async def test_wrong_logprobs_are_refused(api, value):
    assert (await api.refused(PATH, logprobs=value))["param"] == "logprobs"


async def test_suffix_and_best_of_are_refused_unless_they_ask_for_nothing(api):
    assert (await api.refused(PATH, suffix="x"))["param"] == "suffix"
    assert (await api.refused(PATH, best_of=3))["param"] == "best_of"
    assert await api.answer(PATH, suffix=None, best_of=2, n=2)


async def test_usage_in_a_stream(api):
    events = await api.events(PATH, n=2, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert events[-1]["choices"] == []


async def test_a_long_text_is_tokenised_to_the_same_ids(api, backend, tokenizer):
    text = "The quick brown fox. " * 1200  # above the length from which a thread does it
    await api.answer(PATH, prompt=text)
    assert backend.requests[0].tokens == tokenizer.encode(text)
