"""The app over the real engine with the default model, all in this process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import httpx
import pytest
from loop_backend import LoopBackend, idle

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.serve.openai.app import create_app

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture(scope="module")
def backend(model_dir) -> Iterator[LoopBackend]:
    values = {
        "model": {"model_path": str(model_dir), "device": "cpu", "dtype": "float32"},
        "memory": {"max_total_tokens": 1024},
        "schedule": {"chunked_prefill_size": 64},
    }
    backend = LoopBackend(Engine.load(Config.parse(values)))
    backend.loop.start()
    yield backend
    backend.loop.stop()


@BOTH
async def test_pub_041_to_044_stop_strings(api, path):
    force = api.force(33203)
    cut, begun, missed, kept = await asyncio.gather(
        api.texts(path, **force, stop=["EFD"], max_tokens=8),
        api.texts(path, **force, stop=["DE"], max_tokens=8),
        api.texts(path, **force, stop=["FX"], max_tokens=3),
        api.texts(path, **force, stop=["EFD"], max_tokens=8, no_stop_trim=True),
    )
    assert cut == ("stop:D",) * 2
    assert begun == ("stop:",) * 2
    assert missed == ("length:DEFDEFDEF",) * 2
    assert kept == ("stop:DEFD",) * 2
    assert (await api.answer(path, **force, stop=["EFD"], max_tokens=8))["usage"]["completion_tokens"] == 2


@BOTH
async def test_pub_046_to_048_end_tokens(api, path):
    assert await api.texts(path, **api.force(2), max_tokens=5) == ("stop:",) * 2
    answer = await api.answer(path, **api.force(2), max_tokens=5, ignore_eos=True)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 5)
    answer = await api.answer(path, **api.force(2), max_tokens=10, min_tokens=3)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 4)


@BOTH
async def test_pub_040_and_pub_035_parts_of_characters(api, path, tokenizer):
    force = api.force(10813)
    assert await api.texts(path, **force, max_tokens=1) == ("length:\ufffd",) * 2
    events = await api.events(path, **force, max_tokens=12)
    assert len(events) > 6
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] if path == TEXT else choice["delta"].get("content", "") for choice in choices)
    assert text == tokenizer.decode([10813] * 12)


@BOTH
async def test_greedy_streams_join_to_the_whole_and_repeat(api, path):
    whole, streamed = await api.texts(path, temperature=0, max_tokens=12)
    assert whole == streamed
    assert (await api.texts(path, temperature=0, max_tokens=12))[0] == whole
    assert len(whole) > 12


async def test_pub_056_three_choices_with_one_prompt(api):
    events = await api.events(CHAT, n=3, temperature=1, max_tokens=12, stream_options={"include_usage": True})
    choices = [choice for event in events for choice in event["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]
    assert events[-1]["usage"]["prompt_tokens"] == 31
    assert events[-1]["usage"]["completion_tokens"] <= 36


@BOTH
async def test_pub_060_seeds_fix_the_text(api, path):
    async def text(**fields):
        answer = await api.answer(path, temperature=1, max_tokens=8, **fields)
        return answer["choices"][0]["text"] if path == TEXT else answer["choices"][0]["message"]["content"]

    *seeded, free, freer, several = await asyncio.gather(
        *(text(seed=seed) for seed in (0, 0, 1, 2)),
        text(),
        text(),
        api.answer(path, temperature=1, max_tokens=8, seed=0, n=3),
    )
    assert seeded[0] == seeded[1]
    assert len(set(seeded)) > 1
    assert free != freer
    texts = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in several["choices"]]
    assert seeded[1:] == texts


@BOTH
async def test_pub_109_top_k_one_is_greedy(api, path):
    greedy, *narrow = await asyncio.gather(
        api.texts(path, temperature=0, max_tokens=8),
        api.texts(path, temperature=1, top_k=1, max_tokens=8),
        api.texts(path, temperature=1, top_p=0, max_tokens=8),
    )
    assert narrow == [greedy] * 2
    wide = await asyncio.gather(*(api.answer(path, top_k=top_k, seed=1) for top_k in (-1, 0, 49152, 9999999)))
    assert len({str(answer["choices"]) for answer in wide}) == 1


async def test_pub_049_and_pub_050_prompt_logprobs_are_complete_and_repeat(api):
    prompt = [1000 + (7 * index) % 300 for index in range(150)]  # more than two chunks of the prefill
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    found = []
    for ids in (prompt, prompt, prompt[:100] + prompt[:50]):
        logprobs = (await api.answer(TEXT, prompt=ids, **fields))["choices"][0]["logprobs"]
        values = logprobs["token_logprobs"]
        assert len(values) == 151
        assert values[0] is None
        assert all(-100 < value <= 0 for value in values[1:])
        found.append(values)
    assert max(abs(a - b) for a, b in zip(found[0][1:], found[1][1:], strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(found[0][1:100], found[2][1:100], strict=True)) < 1e-4


async def test_pub_051_streamed_logprobs_equal_whole_ones(api):
    fields = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 10}
    whole = (await api.answer(CHAT, **fields))["choices"][0]["logprobs"]["content"]
    events = await api.events(CHAT, **fields)
    parts = [choice["logprobs"]["content"] for event in events for choice in event["choices"] if choice["logprobs"]]
    streamed = [entry for part in parts for entry in part]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    assert all(entry["token"] in [other["token"] for other in entry["top_logprobs"]] for entry in whole)
    assert all(len(entry["top_logprobs"]) == 3 for entry in whole)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_pub_090_and_pub_091_leaving_frees_the_engine(api, backend, path, stream, tokenizer):
    """The call is cancelled as a server does it when the client's connection closes."""
    call = asyncio.ensure_future(api.post(path, stream=stream, max_tokens=800, ignore_eos=True, n=2))
    while not backend.loads()["here"].running:
        await asyncio.sleep(0.005)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    load = await idle(backend)
    assert load.free_pages + load.cached_pages == load.total_pages
    assert await api.answer(path, max_tokens=2)


async def test_pub_066_what_the_memory_cannot_hold_is_answered(api, backend):
    error = await api.refused(TEXT, prompt=[5] * 1100, max_tokens=4)
    assert error["type"] == "invalid_request_error"
    response = await api.post(TEXT, prompt=[5] * 1000, max_tokens=1000, ignore_eos=True)
    assert response.status_code in (200, 400)
    assert (await api.post(TEXT, max_tokens=2)).status_code == 200
    await idle(backend)


async def test_callers_with_different_salts_share_no_cached_prefix(api):
    messages = [{"role": "user", "content": "Count the words of this sentence, which fills more than one page."}]

    async def num_cached(salt: str) -> int:
        usage = (await api.answer(CHAT, messages=messages, max_tokens=1, cache_salt=salt))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await num_cached("salt-1") == 0 < await num_cached("salt-1")
    assert await num_cached("salt-2") == 0 < await num_cached("salt-2")


async def test_pub_131_a_time_limit_stops_the_engine(backend, tokenizer, api):
    config = Config.parse({"api": {"request_timeout_s": 0.3}})
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(config, tokenizer, backend)), base_url="http://test"
    )
    response = await http.post(CHAT, json=api.body(CHAT, max_tokens=900, ignore_eos=True))
    assert response.status_code == 408
    stream = await http.post(CHAT, json=api.body(CHAT, max_tokens=900, ignore_eos=True, stream=True))
    assert "request_timeout" in stream.text
    await idle(backend)


async def test_pub_049_and_pub_050_native_prompt_logprobs_are_those_of_an_echo_whatever_is_cached(api):
    prompt = [2000 + (11 * index) % 300 for index in range(150)]  # more than two chunks of the prefill
    echo = (await api.answer(TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=1))["choices"][0]["logprobs"]
    for start in (0, 1, 70, 149, 150):
        fields = {"return_logprob": True, "logprob_start_len": start, "sampling_params": {"max_new_tokens": 0}}
        meta = (await api.answer(NATIVE, text=..., input_ids=prompt, **fields))["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt[start:]
        for entry, value in zip(meta["input_token_logprobs"], echo["token_logprobs"][start:150], strict=True):
            assert entry[0] is value is None or abs(entry[0] - value) < 1e-4
        assert meta["cached_tokens"] <= max(0, start - 1)
        assert (meta["cached_tokens"] > 0) == (start > 16), "what comes before the start may be cached"
    assert echo["token_logprobs"][0] is None


async def test_logprobs_of_chosen_ids_are_those_of_the_alternatives_whatever_is_cached(api):
    prompt = [2500 + (7 * index) % 300 for index in range(60)]
    fields = {"input_ids": prompt, "text": ..., "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    first = (await api.answer(NATIVE, **fields, top_logprobs_num=4, logprob_start_len=40))["meta_info"]
    best = [token for _, token, _ in first["input_top_logprobs"][10]]
    for start in (40, 0):
        asked = {"logprob_start_len": start, "token_ids_logprob": [*best, 0]}
        meta = (await api.answer(NATIVE, **fields, **asked))["meta_info"]
        found = meta["input_token_ids_logprobs"][40 - start :][10]
        assert [token for _, token, _ in found] == [*best, 0]
        for own, top in zip(found, first["input_top_logprobs"][10], strict=False):
            assert abs(own[0] - top[0]) < 1e-4
        assert len(meta["input_token_ids_logprobs"]) == len(prompt) - start
        assert [len(row) for row in meta["output_token_ids_logprobs"]] == [5, 5]
        assert (meta["cached_tokens"] > 0) == (start == 40)
    assert meta["input_token_ids_logprobs"][0] is None


async def test_pub_051_streamed_native_logprobs_equal_whole_ones(api):
    sampling = {"temperature": 0, "max_new_tokens": 10}
    fields = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
    whole = (await api.answer(NATIVE, **fields))["meta_info"]
    streamed = (await api.events(NATIVE, **fields))[-1]["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert len(whole[name]) == len(streamed[name]) > 1
    assert [entry[1] for entry in whole["output_token_logprobs"]] == [
        entry[1] for entry in streamed["output_token_logprobs"]
    ]
    assert all(
        own[1] in [other[1] for other in best]
        for own, best in zip(whole["output_token_logprobs"], whole["output_top_logprobs"], strict=True)
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_stopped_by_its_name_gives_what_there_is(api, backend, stream):
    sampling = {"max_new_tokens": 900, "ignore_eos": True, "n": 2}
    call = asyncio.ensure_future(api.post(NATIVE, stream=stream, rid="long", sampling_params=sampling))
    while backend.loads()["here"].running < 2:
        await asyncio.sleep(0.005)
    assert (await api.http.post("/abort_request", json={"rid": "lon"})).status_code == 200
    assert not call.done()
    assert (await api.http.post("/abort_request", json={"rid": "long"})).status_code == 200
    response = await call
    assert response.status_code == 200
    assert response.text.count('"type":"abort"') == 2
    load = await idle(backend)
    assert load.free_pages + load.cached_pages == load.total_pages


async def test_a_flush_makes_the_next_prompt_new_and_waits_for_running_calls(api, backend):
    prompt = {"text": ..., "input_ids": [3000 + index for index in range(40)], "sampling_params": {"max_new_tokens": 2}}
    await api.answer(NATIVE, **prompt)
    assert (await api.answer(NATIVE, **prompt))["meta_info"]["cached_tokens"] > 0
    assert (await api.http.post("/flush_cache?timeout=5")).status_code == 200
    assert (await idle(backend)).cached_pages == 0
    assert (await api.answer(NATIVE, **prompt))["meta_info"]["cached_tokens"] == 0
    call = asyncio.ensure_future(api.post(NATIVE, sampling_params={"max_new_tokens": 16, "ignore_eos": True}))
    while not backend.loads()["here"].running:
        await asyncio.sleep(0.005)
    assert (await api.http.post("/flush_cache")).json()["error"]["code"] == "cache_in_use"
    assert (await api.http.post("/flush_cache?timeout=30")).status_code == 200
    assert (await call).status_code == 200


async def test_health_by_a_token_comes_from_the_engine(api, backend):
    before = (await idle(backend)).generation_tokens
    assert (await api.http.get("/health_generate")).status_code == 200
    assert (await idle(backend)).generation_tokens == before + 1


async def test_scores_are_the_probabilities_that_the_labels_have_as_next_tokens(api):
    prompts = [[4000 + index for index in range(60)] + [item] for item in (5000, 6000)]
    best = []
    for prompt in prompts:
        meta = (await api.answer(NATIVE, text=..., input_ids=prompt, return_logprob=True, top_logprobs_num=3))[
            "meta_info"
        ]
        best.append({token: math.exp(value) for value, token, _ in meta["output_top_logprobs"][0]})
    labels = [*best[0], *best[1]]
    body = {"query": prompts[0][:60], "items": [[5000], [6000]], "label_token_ids": labels}
    scores = (await api.http.post("/v1/score", json=body)).json()["scores"]
    assert [len(row) for row in scores] == [6, 6]
    for row, expected in zip(scores, best, strict=True):
        found = dict(zip(labels, row, strict=True))
        assert all(abs(found[token] - value) < 1e-4 for token, value in expected.items())
    shares = (await api.http.post("/v1/score", json=body | {"apply_softmax": True})).json()["scores"]
    for row, share in zip(scores, shares, strict=True):
        assert abs(sum(share) - 1) < 1e-9
        assert all(abs(one - value / sum(row)) < 1e-4 for one, value in zip(share, row, strict=True))


async def test_three_apis_give_the_same_answer_to_the_same_conversation(api, backend):
    said = [{"role": "user", "content": "Name three rivers."}]
    asked = {"model": "smollm2-135m-instruct", "temperature": 0}
    chat = (await api.answer(CHAT, messages=said, max_tokens=16, temperature=0))["choices"][0]["message"]["content"]
    paths = {
        "/v1/responses": {"input": said, "max_output_tokens": 16},
        "/v1/messages": {"messages": said, "max_tokens": 16},
    }
    for path, fields in paths.items():
        whole = (await api.http.post(path, json=asked | fields)).json()
        text = whole["content"][0]["text"] if "content" in whole else whole["output"][0]["content"][0]["text"]
        assert text == chat and text
        usage = whole["usage"]
        cached = usage.get("cache_read_input_tokens", usage.get("input_tokens_details", {}).get("cached_tokens"))
        assert cached > 0 and usage["output_tokens"] == 16
        streamed = await api.http.post(path, json=asked | fields | {"stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: ")]
        deltas = [event["delta"] for event in events if event["type"].endswith(("text.delta", "block_delta"))]
        assert "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas) == chat
    await idle(backend)
