"""Where answers end: stop strings, stop tokens, end tokens, limits; and that streams join to the whole."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
WIDTHS = pytest.mark.parametrize("width", [1, 3, 8])


@BOTH
@WIDTHS
async def test_pub_041_a_stop_string_over_two_tokens(api, backend, path, width):
    backend.width = width
    fields = {**api.force(33203), "stop": ["EFD"], "max_tokens": 8}
    assert await api.texts(path, **fields) == ("stop:D",) * 2
    assert (await api.answer(path, **fields))["usage"]["completion_tokens"] == 2
    events = await api.events(path, **fields, stream_options={"include_usage": True})
    assert events[-1]["usage"]["completion_tokens"] == 2


@BOTH
@WIDTHS
async def test_pub_042_a_stop_string_inside_one_token(api, backend, path, width):
    backend.width = width
    for stop in ("DE", ["DE"]):
        fields = {**api.force(33203), "stop": stop, "max_tokens": 8}
        assert await api.texts(path, **fields) == ("stop:",) * 2
        assert (await api.answer(path, **fields))["usage"]["completion_tokens"] == 1


@BOTH
@WIDTHS
async def test_pub_043_text_that_may_begin_a_stop_string_is_sent_at_the_end(api, backend, path, width):
    backend.width = width
    assert await api.texts(path, **api.force(33203), stop=["FX"], max_tokens=3) == ("length:DEFDEFDEF",) * 2


@BOTH
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_pub_044_the_stop_string_can_be_kept(api, path, name):
    fields = {**api.force(33203), "stop": ["EFD"], "max_tokens": 8, name: True}
    assert await api.texts(path, **fields) == ("stop:DEFD",) * 2


@BOTH
async def test_a_stop_string_aborts_the_engines_request(api, backend, path):
    await api.texts(path, **api.force(33203), stop=["EFD"], max_tokens=1000)
    assert len(backend.aborted) == 2
    assert not backend.running
    assert backend.num_drawn < 20


@BOTH
async def test_pub_046_the_end_token_is_no_text(api, path):
    fields = {**api.force(2), "max_tokens": 5}
    assert await api.texts(path, **fields) == ("stop:",) * 2
    assert await api.texts(path, **fields, skip_special_tokens=False) == ("stop:",) * 2
    assert (await api.answer(path, **fields))["usage"]["completion_tokens"] == 1
    assert await api.texts(path, **fields, no_stop_trim=True, skip_special_tokens=False) == ("stop:<|im_end|>",) * 2


@BOTH
async def test_pub_047_ignore_eos_runs_on(api, path):
    fields = {**api.force(2), "max_tokens": 5, "ignore_eos": True}
    assert await api.texts(path, **fields) == ("length:",) * 2
    assert (await api.answer(path, **fields))["usage"]["completion_tokens"] == 5
    assert await api.texts(path, **fields, skip_special_tokens=False) == ("length:" + "<|im_end|>" * 5,) * 2


@BOTH
async def test_pub_048_min_tokens_come_before_the_end_token(api, path):
    answer = await api.answer(path, **api.force(2), min_tokens=3, max_tokens=10)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4


@BOTH
async def test_min_tokens_above_the_limit_are_refused(api, path):
    assert (await api.refused(path, min_tokens=5, max_tokens=4))["param"] == "min_tokens"


@BOTH
async def test_a_stop_token_ends_the_answer_and_is_no_text(api, path):
    assert await api.texts(path, stop_token_ids=[905]) == ("stop:, a",) * 2
    assert await api.texts(path, stop_token_ids=[905], no_stop_trim=True) == ("stop:, a world",) * 2


@BOTH
@WIDTHS
async def test_pub_035_text_streams_though_no_character_is_ever_whole(api, backend, path, width, tokenizer):
    backend.width = width
    fields = {**api.force(10813), "ignore_eos": True, "max_tokens": 1500}
    events = await api.events(path, **fields)
    assert len(events) > 1500 / width / 2
    assert await api.texts(path, **fields) == ("length:" + tokenizer.decode([10813] * 1500),) * 2


@BOTH
async def test_pub_040_an_unfinished_character_is_flushed_at_the_end(api, path):
    assert await api.texts(path, **api.force(10813), max_tokens=1) == ("length:\ufffd",) * 2


@BOTH
@WIDTHS
async def test_a_character_of_three_tokens_is_sent_whole(api, backend, path, width):
    backend.width, backend.script = width, [178, 239, 230]
    assert await api.texts(path, max_tokens=6) == ("length:界界",) * 2
    assert await api.texts(path, max_tokens=6, stop="界") == ("stop:",) * 2
    events = await api.events(path, max_tokens=6)
    assert "\ufffd" not in str(events)


@BOTH
async def test_a_stop_string_that_only_the_last_flush_completes(api, path):
    assert await api.texts(path, **api.force(10813), max_tokens=1, stop="\ufffd") == ("stop:",) * 2


@BOTH
async def test_pub_062_limits_at_the_edge(api, backend, path):
    answer = await api.answer(path, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0
    assert await api.texts(path, max_tokens=0) == ("length:",) * 2
    assert not backend.requests
    assert (await api.refused(path, max_tokens=-1))["param"] == "max_tokens"
    assert (await api.answer(path, max_tokens=1))["usage"]["completion_tokens"] == 1
    for huge in (10**12, 10**400):
        assert (await api.refused(path, max_tokens=huge))["code"] == "context_length_exceeded"


async def test_pub_063_defaults_of_the_limit(api, backend):
    import dataclasses

    backend.info = dataclasses.replace(backend.info, context_length=300)
    for fields in ({"max_tokens": ...}, {"max_tokens": None}):
        answer = await api.answer(CHAT, **fields, **api.force(33203))
        assert answer["usage"]["total_tokens"] == 300
    answer = await api.answer(CHAT, max_tokens=..., max_completion_tokens=5, **api.force(33203))
    assert answer["usage"]["completion_tokens"] == 5
    answer = await api.answer(TEXT, max_tokens=..., **api.force(33203))
    assert answer["usage"]["completion_tokens"] == 16
    answer = await api.answer(TEXT, max_tokens=..., prompt=[5] * 290, **api.force(33203))
    assert answer["usage"]["completion_tokens"] == 10


async def test_two_limits_must_agree(api):
    assert (await api.answer(CHAT, max_tokens=3, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await api.refused(CHAT, max_tokens=3, max_completion_tokens=4))["param"] == "max_tokens"


async def test_pub_064_a_prompt_longer_than_the_context(api, backend):
    long_chat = [{"role": "user", "content": " a" * 9000}]
    cases = [(TEXT, {"prompt": [5] * 9000}), (TEXT, {"prompt": [5] * 8192}), (CHAT, {"messages": long_chat})]
    for path, fields in cases:
        error = await api.refused(path, max_tokens=..., **fields)
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert "8192" in error["message"]
        assert any(number in error["message"] for number in ("9000", "8192 tokens, but the prompt has 8192", "9030"))
    assert not backend.requests
    assert (await api.post(TEXT)).status_code == 200


async def test_pub_065_prompt_and_answer_together_do_not_fit(api):
    error = await api.refused(TEXT, prompt=[5] * 8000, max_tokens=500)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("8192", "8000", "500"))
    assert (await api.post(TEXT, prompt=[5] * 8000, max_tokens=192)).status_code == 200
