"""The log of requests: what a line tells, of which calls, and what it never holds."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from sgray.errors import ConfigError, EngineError
from sgray.serve.openai.keys import OPEN_PATHS

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
SECRET = "my dog is called Bello"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def app(make_app, log: Path) -> Starlette:
    """With a log."""
    return make_app(request_log=str(log))


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_a_line_with_its_id_counts_and_times(api, backend, log, stream):
    backend.cached_tokens, backend.pause_s = 1, 0.002
    body = api.body(PATH, prompt=SECRET, stream=stream, max_tokens=5)
    response = await api.http.post(PATH, json=body, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    (line,) = lines(log)
    assert 0.002 <= line.pop("first_token_s") <= line.pop("total_s") < 5
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "id": "mine",
        "method": "POST",
        "route": PATH,
        "status": 200,
        "outcome": "finished",
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "cached_tokens": 1,
        "replica": "replica-1",
    }


async def test_refusals_and_other_routes_are_lines_as_well(api, log):
    await api.post(PATH, temperature=-1)
    await api.http.get("/v1/models?secret=1")
    await api.http.get("/nothing/secret")
    for path in OPEN_PATHS:
        await api.http.get(path)
    found = [(line["route"], line["status"], line.get("outcome")) for line in lines(log)]
    assert found == [(PATH, 400, None), ("/v1/models", 200, None), ("unknown", 404, None)]
    assert "secret" not in log.read_text()


async def test_a_stream_that_breaks_says_so(api, backend, log):
    backend.fail_after, backend.failure = 2, EngineError("broke")
    assert (await api.post(PATH, stream=True)).status_code == 200
    (line,) = lines(log)
    assert (line["status"], line["outcome"], line["completion_tokens"]) == (200, "failed", 2)


async def test_a_client_that_leaves_is_a_line(api, backend, log):
    backend.pause_s = 0.01
    task = asyncio.create_task(api.post(PATH, max_tokens=500))
    while backend.num_drawn < 2:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (line,) = lines(log)
    assert (line["status"], line["outcome"]) == (499, "aborted") and 2 <= line["completion_tokens"] < 100


async def test_a_key_shows_as_the_beginning_of_its_digest_and_texts_never(make_app, log, tmp_path):
    (tmp_path / "keys").write_text("sk-caller")
    app = make_app(request_log=str(log), api_keys_file=str(tmp_path / "keys"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = {"model": "smollm2-135m-instruct", "prompt": SECRET, "max_tokens": 2}
        for key in ("sk-caller", "sk-wrong"):
            await http.post(PATH, json=body, headers={"authorization": f"Bearer {key}"})
    good, bad = lines(log)
    assert good["key"] == hashlib.sha256(b"sk-caller").hexdigest()[:12]
    assert bad["status"] == 401 and "key" not in bad
    text = log.read_text()
    assert "Bello" not in text and "sk-" not in text and text.isascii()


async def test_a_file_that_is_moved_away_begins_anew(api, log):
    await api.http.get("/v1/models")
    log.rename(log.with_suffix(".old"))
    await api.http.get("/v1/models")
    assert len(lines(log)) == len(lines(log.with_suffix(".old"))) == 1


async def test_a_file_that_cannot_be_written_stops_the_start_and_later_no_call(make_app, api, log, caplog):
    with pytest.raises(ConfigError, match=r"api\.request_log: /nowhere/x"):
        make_app(request_log="/nowhere/x")
    await api.http.get("/v1/models")
    log.unlink()
    log.mkdir()
    for _ in range(3):
        assert (await api.http.get("/v1/models")).status_code == 200
    assert len([record for record in caplog.records if "lines are lost" in record.message]) == 1
