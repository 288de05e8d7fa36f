"""Counts on every path: whole, streamed, aborted, failed; and the gauges of replicas."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgray.config import ApiConfig, Config, KeyHashes
from sgray.errors import EngineError
from sgray.protocol import Load
from sgray.serve.openai.app import app_of
from sgray.serve.openai.keys import Keyring
from sgray.serve.openai.metrics import engine_metrics
from sgray.serve.openai.service import OpenAIService

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def read(api) -> dict[str, float]:
    """All samples without labels other than the model's, by name."""
    response = await api.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_tokens_and_calls_count_on_every_path(api, backend):
    backend.cached_tokens = 1
    for fields in ({}, {"stream": True}, {"n": 2}, {"stream": True, "n": 2}):
        await api.post(TEXT, **fields)
    found = await read(api)
    assert found["sgray:num_requests_total"] == 4
    assert found["sgray:prompt_tokens_total"] == 8
    assert found["sgray:cached_tokens_total"] == 4
    assert found["sgray:generation_tokens_total"] == 24
    assert found["sgray:num_active_requests"] == 0
    assert found["sgray:time_to_first_token_seconds_count"] == 4
    assert found["sgray:inter_token_latency_seconds_count"] == 18
    assert found["sgray:e2e_request_latency_seconds_count"] == 4


async def test_failed_and_refused_calls_are_told_apart(api, backend):
    await api.post(TEXT, n=0)
    backend.fail_after, backend.failure = 2, EngineError("broke")
    await api.post(TEXT)
    await api.post(TEXT, stream=True)
    found = await read(api)
    assert found["sgray:num_requests_total"] == 2
    assert found["sgray:num_failed_requests_total"] == 2
    assert found["sgray:num_active_requests"] == 0
    text = (await api.http.get("/metrics")).text
    assert 'sgray:http_responses_total{route="/v1/completions",status="400"} 1.0' in text
    assert 'sgray:http_responses_total{route="/v1/completions",status="500"} 1.0' in text


async def test_a_path_that_does_not_exist_makes_no_label(api):
    await api.http.get("/some/long/path")
    text = (await api.http.get("/metrics")).text
    assert "/some" not in text
    assert 'route="unknown",status="404"' in text


async def test_an_aborted_stream_counts_as_aborted(tokenizer, backend, api):
    service = OpenAIService(Config(), tokenizer, backend)
    assert app_of(service, Config(), Keyring(ApiConfig(), KeyHashes()), batches=None)
    chunks = await service.chat(api.body(CHAT, stream=True, max_tokens=1000))
    async for _ in chunks:
        break
    await chunks.aclose()
    text = service.metrics.text().decode()
    assert 'sgray:num_aborted_requests_total{model_name="smollm2-135m-instruct"} 1.0' in text
    assert 'sgray:num_active_requests{model_name="smollm2-135m-instruct"} 0.0' in text


async def test_the_load_of_each_replica_is_shown_in_tokens(api):
    text = (await api.http.get("/metrics")).text
    assert 'sgray:token_usage{replica="replica-1"} 0.5' in text
    assert 'sgray:max_total_num_tokens{replica="replica-1"} 16384.0' in text
    assert 'sgray:num_running_reqs{replica="replica-1"} 0.0' in text
    assert 'sgray:cache_hit_rate{replica="replica-1"} 0.0' in text


async def test_two_apps_do_not_share_counts(api, make_app):
    await api.post(TEXT)
    assert make_app() is not None
    assert (await read(api))["sgray:num_requests_total"] == 1


async def test_every_figure_of_a_load_is_shown():
    load = Load(**dict.fromkeys(Load.__dataclass_fields__, 7))
    families = engine_metrics({"a": load, "b": load}, 16)
    assert all(len(family.samples) == 2 and family.samples[0].value > 0 for family in families)
    assert all(re.fullmatch(r"sgray:[a-z_]+", family.name) for family in families)
