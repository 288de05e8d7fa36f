"""Constrained answers of the whole application: the grammar chooses the text, so random weights will do."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette

from sgray.config import Config
from sgray.serve.openai.app import create_app

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture
def app(tiny_backend, tokenizer) -> Starlette:
    return create_app(Config(), tokenizer, tiny_backend)


@BOTH
async def test_pub_045_a_stop_string_in_the_middle_of_a_character_of_three_tokens(api, path):
    fields = {"regex": "AB界CD", "max_tokens": 30}
    assert await api.texts(path, **fields) == ("stop:AB界CD",) * 2
    assert await api.texts(path, **fields, stop=["界"]) == ("stop:AB",) * 2
    for event in await api.events(path, **fields, stop=["界"]):
        for choice in event["choices"]:
            assert "\ufffd" not in (choice["text"] if path == TEXT else choice["delta"].get("content", ""))


async def test_pub_052_what_the_grammar_forbids_is_no_alternative_or_has_a_finite_logprob(api):
    choice = (await api.answer(CHAT, regex="(yes|no)", logprobs=True, top_logprobs=10))["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")
    entries = choice["logprobs"]["content"]
    assert entries
    values = [one["logprob"] for entry in entries for one in [entry, *entry["top_logprobs"]]]
    assert all(-9999 <= value <= 0 for value in values)
    choice = (await api.answer(TEXT, regex="(yes|no)", logprobs=5))["choices"][0]
    assert choice["text"] in ("yes", "no")
    assert all(-9999 <= value <= 0 for top in choice["logprobs"]["top_logprobs"] for value in top.values())


async def test_pub_055_bytes_join_to_the_text_though_no_token_is_a_character(api):
    choice = (await api.answer(CHAT, regex="🦤世", max_tokens=30, logprobs=True))["choices"][0]
    assert choice["message"]["content"] == "🦤世"
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "🦤世".encode()
    assert len(entries) > 2


@pytest.mark.parametrize("regex", ["(", "[z-a]", "a{99999999999}", "\\", "(?=a)b"])
async def test_a_pattern_that_is_none_is_refused_and_the_next_call_is_answered(api, regex):
    assert (await api.refused(CHAT, regex=regex))["param"] == "regex"
    assert (await api.texts(CHAT, regex="ok", max_tokens=9)) == ("stop:ok",) * 2
