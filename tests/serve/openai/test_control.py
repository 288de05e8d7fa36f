"""The routes beside calls: facts, health by a token, stopping a call, emptying the cache."""

from __future__ import annotations

import asyncio
import hashlib
import json

import httpx
import pytest

import sgray
from sgray.config import Config
from sgray.errors import OverloadedError, ReplicaLostError
from sgray.protocol import Finish
from sgray.serve.openai import control
from sgray.serve.openai.app import create_app

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_the_model_is_told_as_clients_of_sglang_read_it(api, path):
    told = (await api.http.get(path)).json()
    assert told["model_path"] == told["tokenizer_path"] == Config.parse({}).model.model_path
    assert (told["is_generation"], told["architectures"]) == (True, ["LlamaForCausalLM"])


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_the_server_tells_version_configuration_and_loads(api, path):
    told = (await api.http.get(path)).json()
    assert told["version"] == sgray.__version__
    assert told["max_total_num_tokens"] == 16 * 1024
    assert told["config"]["schedule"]["schedule_policy"] == "fcfs"
    (load,) = told["internal_states"]
    assert (load["replica"], load["running"], load["leased_pages"]) == ("replica-1", 0, 512)


async def test_the_server_tells_nothing_of_its_keys(tokenizer, backend, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("very-secret\n")
    app = create_app(Config.parse({"api": {"api_keys_file": str(keys)}}), tokenizer, backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.get("/server_info")).status_code == 401
        told = await http.get("/server_info", headers={"authorization": "Bearer very-secret"})
    assert told.status_code == 200
    for secret in ("very-secret", hashlib.sha256(b"very-secret").hexdigest(), "keys.txt", "keys_file"):
        assert secret not in told.text


async def test_facts_before_any_replica_was_seen_are_a_503(api, backend, monkeypatch):
    def unknown(self):
        raise OverloadedError("no engine replica is up yet; try again soon")

    monkeypatch.setattr(type(backend), "info", property(unknown), raising=False)
    for path in ("/model_info", "/server_info"):
        response = await api.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")


async def test_health_by_a_token_draws_exactly_one(api, backend):
    assert (await api.http.get("/health_generate")).status_code == 200
    (probe,) = backend.requests
    assert (probe.sampling.max_new_tokens, len(probe.tokens), backend.num_drawn) == (1, 1, 1)
    assert not backend.running


@pytest.mark.parametrize("failure", [ReplicaLostError("gone"), OverloadedError("full"), Finish("abort")])
async def test_health_by_a_token_is_a_503_where_none_can_be_drawn(api, backend, failure):
    backend.fail_after, backend.failure = 0, failure
    response = await api.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in response.headers


async def test_health_by_a_token_does_not_wait_for_a_stuck_replica(api, backend, monkeypatch):
    monkeypatch.setattr(control, "PROBE_S", 0.05)
    backend.pause_s = 5.0
    assert (await asyncio.wait_for(api.http.get("/health_generate"), 2)).status_code == 503
    assert len(backend.aborted) == 1


async def test_a_call_is_stopped_by_its_name_and_all_by_none(api, backend):
    assert (await api.http.post("/abort_request", json={"rid": "job-7"})).status_code == 200
    assert (await api.http.post("/abort_request", json={"rid": "", "abort_all": True})).status_code == 200
    assert backend.stopped == ["job-7", None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "rid"),
        ({"rid": ""}, "rid"),
        ({"rid": 7}, "rid"),
        ({"rid": ["a"]}, "rid"),
        ({"rid": "x" * 513}, "rid"),
        ({"rid": "\ud800"}, "rid"),
        ({"abort_all": "yes"}, "abort_all"),
        ({"id": "x"}, "id"),
        ([], None),
    ],
)
async def test_an_abort_of_nothing_that_can_be_named_is_refused(api, backend, body, param):
    response = await api.http.post("/abort_request", content=json.dumps(body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not backend.stopped


async def test_programs_are_said_to_have_ended(api, backend):
    assert (await api.http.post("/end_programs", json={"program_ids": ["p", "q"]})).status_code == 200
    assert backend.ended == ["p", "q"]
    for body, param in (
        ({}, "program_ids"),
        ({"program_ids": "p"}, "program_ids"),
        ({"program_ids": ["p", 5]}, "program_ids"),
        ({"program_ids": ["\ud800"]}, "program_ids"),
        ({"program_ids": ["p"] * 4097}, "program_ids"),
    ):
        response = await api.http.post("/end_programs", content=json.dumps(body))
        assert (response.status_code, response.json()["error"]["param"].partition("[")[0]) == (400, param)
    assert backend.ended == ["p", "q"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_flush_empties_all_caches_or_says_who_holds_them(api, backend, method):
    response = await api.http.request(method, "/flush_cache")
    assert (response.status_code, response.text) == (200, "Cache flushed.\n")
    backend.holders = ["replica-1"]
    response = await api.http.request(method, "/flush_cache")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "cache_in_use")
    assert "replica-1" in response.json()["error"]["message"]
    assert backend.flushed == 2


async def test_a_flush_with_a_timeout_waits_for_running_requests(api, backend):
    backend.holders = ["replica-1"]
    asyncio.get_running_loop().call_later(0.15, backend.holders.clear)
    assert (await api.http.post("/flush_cache?timeout=5")).status_code == 200
    assert backend.flushed > 1


@pytest.mark.parametrize("timeout", ["x", "-1", "nan", "inf", "601", "1e999"])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(api, backend, timeout):
    response = await api.http.post(f"/flush_cache?timeout={timeout}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")
    assert not backend.flushed


async def test_what_touches_everybody_is_the_operators_alone(tokenizer, backend, tmp_path):
    for name in ("caller", "operator"):
        (tmp_path / name).write_text(f"{name}-key\n")
    paths = {"api_keys_file": str(tmp_path / "caller"), "admin_keys_file": str(tmp_path / "operator")}
    app = create_app(Config.parse({"api": paths}), tokenizer, backend)
    caller, operator = ({"authorization": f"Bearer {name}-key"} for name in ("caller", "operator"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.post("/flush_cache", headers=caller)).status_code == 403
        assert (await http.post("/abort_request", json={"abort_all": True}, headers=caller)).status_code == 403
        assert (await http.post("/abort_request", json={"rid": "mine"}, headers=caller)).status_code == 200
        assert backend.stopped == ["mine"]
        assert (await http.post("/flush_cache", headers=operator)).status_code == 200
        assert (await http.post("/abort_request", json={"abort_all": True}, headers=operator)).status_code == 200
