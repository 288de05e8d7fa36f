"""Scores of items over HTTP; the probabilities themselves are checked with a real engine."""

from __future__ import annotations

import json
import math

import pytest

from sgray.protocol import TokenLogprobs
from sgray.serve.openai import scores

pytestmark = pytest.mark.anyio
BODY = {"query": "Is it red? ", "items": ["rose", "grass"], "label_token_ids": [9820, 787]}


async def answer(api, **changes):
    response = await api.http.post("/v1/score", json=BODY | changes)
    assert response.status_code == 200, response.text
    return response.json()


async def test_each_item_gets_a_row_in_the_order_of_the_labels(api, backend, monkeypatch):
    def submit(request):
        async def deltas():
            async for delta in original(request):
                delta.prompt_logprobs[-1] = TokenLogprobs(-request.tokens[-1] / 1000)
                yield delta

        return deltas()

    original = backend.submit
    monkeypatch.setattr(backend, "submit", submit)
    told = await answer(api)
    rows = [pytest.approx([math.exp(-9.82), math.exp(-0.787)])] * 2
    assert (told["object"], told["model"], told["scores"]) == ("scoring", "smollm2-135m-instruct", rows)
    (first, second) = (await answer(api, apply_softmax=True))["scores"]
    assert first == second == pytest.approx([math.exp(-9.033) / (1 + math.exp(-9.033)), 1 / (1 + math.exp(-9.033))])


async def test_texts_are_joined_before_they_become_ids_and_the_label_comes_last(api, backend, tokenizer):
    told = await answer(api)
    texts = ["Is it red? rose", "Is it red? grass"]
    expected = sorted([*tokenizer.encode(text), label] for text in texts for label in BODY["label_token_ids"])
    assert sorted(request.tokens for request in backend.requests) == expected
    assert told["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    assert all(request.sampling.prompt_logprobs_start == len(request.tokens) - 1 for request in backend.requests)
    backend.requests.clear()
    await answer(api, item_first=True, items="rose ", label_token_ids=[9820])
    assert backend.requests[0].tokens == [*tokenizer.encode("rose Is it red? "), 9820]


async def test_ids_are_joined_as_they_are(api, backend):
    await answer(api, query=[1, 2], items=[[3], [4, 5]], label_token_ids=[7])
    assert sorted(request.tokens for request in backend.requests) == [[1, 2, 3, 7], [1, 2, 4, 5, 7]]


async def test_labels_that_are_all_impossible_share_equally():
    assert scores._softmax([-math.inf, -math.inf]) == [0.5, 0.5]
    assert scores._softmax([-math.inf, -2000.0]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"query": 5}, "query"),
        ({"query": []}, "query"),
        ({"query": [49152]}, "query"),
        ({"query": "\ud800"}, "query"),
        ({"items": []}, "items"),
        ({"items": 5}, "items"),
        ({"items": ["a", 5]}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": [1]}, "items"),
        ({"query": [1], "items": [1]}, "items"),
        ({"query": "", "items": [""]}, "items"),
        ({"items": ["a"] * 129}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": 5}, "label_token_ids"),
        ({"label_token_ids": [1.5]}, "label_token_ids"),
        ({"label_token_ids": [49152]}, "label_token_ids"),
        ({"apply_softmax": "yes"}, "apply_softmax"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_its_name(api, backend, changes, param):
    response = await api.http.post("/v1/score", content=json.dumps(BODY | changes))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not backend.requests


async def test_pub_064_an_item_that_leaves_no_room_for_a_label_is_refused_with_the_numbers(api):
    body = {"query": [1] * 8000, "items": [[2] * 191], "label_token_ids": [3]}
    error = (await api.http.post("/v1/score", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "items")
    assert "8192" in error["message"] and "8191" in error["message"]
    assert (await api.http.post("/v1/score", json=body | {"items": [[2] * 190]})).status_code == 200
