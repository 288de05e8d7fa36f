"""What `stream_options` adds to the chunks of a stream."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


@BOTH
@pytest.mark.parametrize("n", [1, 2])
async def test_every_chunk_has_the_counts_so_far_and_the_last_one_all(api, path, n):
    events = await api.events(path, stream_options=COUNTED, max_tokens=6, n=n)
    whole = await api.answer(path, max_tokens=6, n=n)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and len(set(counts)) > 3
    assert counts[0] <= n and counts[-1] == 6 * n
    assert {event["usage"]["prompt_tokens"] for event in events} == {whole["usage"]["prompt_tokens"]}
    assert all(event["usage"]["total_tokens"] == sum(_two(event["usage"])) for event in events)
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    assert all(event["choices"] for event in events[:-1])


def _two(usage):
    return usage["prompt_tokens"], usage["completion_tokens"]


@BOTH
async def test_counts_change_nothing_else_of_a_stream(api, path):
    def bare(events):
        return [event["choices"] for event in events]

    counted = await api.events(path, stream_options=COUNTED, max_tokens=6)
    assert bare(counted) == bare(await api.events(path, stream_options={"include_usage": True}, max_tokens=6))
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": False}):
        events = await api.events(path, stream_options=options, max_tokens=6)
        assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)


@BOTH
@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
async def test_counts_in_every_chunk_need_counts_at_all(api, path, options):
    response = await api.post(path, stream=True, stream_options={**options, "continuous_usage_stats": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options.continuous_usage_stats"
    assert "include_usage" in response.json()["error"]["message"]


async def test_the_openai_client_reads_the_counts(client):
    stream = await client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        stream=True,
        stream_options=COUNTED,
    )
    assert [chunk.usage.completion_tokens async for chunk in stream][-1] == 3
