"""Random bodies and random streams: no input is a 500, and no split of tokens into deltas changes a text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from sgray.protocol import Delta, Finish, SamplingParams
from sgray.serve.openai.choices import Choice
from sgray.serve.openai.prompts import Prompt
from sgray.serve.openai.sampling import TextOptions
from sgray.serve.openai.schemas import UNSUPPORTED, ChatBody, CompletionBody, NativeBody

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROUTES = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody, "/generate": NativeBody}
SHAPES = st.sampled_from([{"role": "user"}, {"type": "json_schema"}, {"include_usage": True}, {"n": 2}, {"stop": "a"}])


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route and up to three fields with values that may or may not fit them."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    names = st.sampled_from([*ROUTES[path].model_fields, *UNSUPPORTED, "unknown"])
    value = VALUES | st.builds(lambda shape, name, inner: shape | {name: inner}, SHAPES, st.text(max_size=8), VALUES)
    return path, draw(st.dictionaries(names, value, min_size=1, max_size=3))


def test_no_body_is_a_500(app, api, backend):
    @settings(max_examples=600)
    @given(changes())
    def check(change: tuple[str, dict[str, Any]]) -> None:
        path, fields = change
        status, text = asyncio.run(send(path, api.body(path, **fields)))
        assert status in (200, 400, 404), text
        if status != 200:
            assert isinstance(json.loads(text)["error"]["message"], str)

    async def send(path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            raw = json.dumps(body)
            response = await http.post(path, content=raw, headers={"content-type": "application/json"})
            return response.status_code, response.text

    backend.info = type(backend.info)(**{**_fields(backend.info), "context_length": 256})
    check()
    assert not backend.running


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


TOKENS = st.lists(st.sampled_from([28, 253, 905, 33203, 10813, 178, 239, 230, 2, 24211]), min_size=1, max_size=24)


def test_no_split_into_deltas_changes_the_answer(tokenizer):
    @settings(max_examples=300)
    @given(
        TOKENS, st.data(), st.lists(st.sampled_from(["EFD", "界", " a w", "\ufffd,", "zz"]), max_size=2, unique=True)
    )
    def check(tokens: list[int], data: st.DataObject, stop: list[str]) -> None:
        options = TextOptions(tuple(stop))
        finish = Finish("stop", matched=2) if tokens[-1] == 2 else Finish("length")
        cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=5)) | {len(tokens)})
        parts = [tokens[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
        one_by_one = [[token] for token in tokens]
        answers = {_answer(tokenizer, split, options, finish) for split in (parts, [tokens], one_by_one)}
        assert len(answers) == 1
        (text, _, _) = answers.pop()
        whole = tokenizer.decode(tokens[:-1] if tokens[-1] == 2 else tokens)
        assert whole.startswith(text)
        assert (text == whole) or any(whole.startswith(text + word) for word in stop)

    check()


def _answer(
    tokenizer: Any, parts: list[list[int]], options: TextOptions, finish: Finish
) -> tuple[str, str | None, int]:
    choice = Choice(0, Prompt([5]), SamplingParams(), options, tokenizer)
    text, reason = "", None
    for index, part in enumerate(parts):
        piece = choice.feed(Delta("x", part, finish=finish if index == len(parts) - 1 else None))
        if piece is not None:
            text, reason = text + piece.text, piece.finish_reason
        if choice.is_finished:
            break
    return text, reason, choice.num_tokens
