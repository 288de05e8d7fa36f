"""The number of engine replicas follows the work, from none to two and back; calls in between are held, not refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from ray import serve

from sgray.config import DEFAULT_MODEL

SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "target_ongoing_requests": 2.0,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 3.0,
}


@pytest.fixture(scope="module")
def service(deploy: Callable[[Mapping[str, Any]], Any]) -> Any:
    return deploy(SCALING)


def num_running() -> int:
    """Engine replicas that Serve counts as running."""
    states = serve.status().applications["sgray"].deployments["LLMReplica"].replica_states
    return sum(count for state, count in states.items() if getattr(state, "value", state) == "RUNNING")


def test_from_none_to_two_and_back_without_a_refusal(service: Any) -> None:
    assert num_running() == 0
    assert httpx.get(f"{service.url}/health", timeout=10).status_code == 503
    assert httpx.get(f"{service.url}/live", timeout=10).status_code == 200

    async def ask(client: httpx.AsyncClient, index: int, max_tokens: int) -> int:
        body = {"model": DEFAULT_MODEL, "prompt": f"Story {index}", "max_tokens": max_tokens, "ignore_eos": True}
        return (await client.post(f"{service.url}/v1/completions", json=body)).status_code

    async def load() -> list[int]:
        async with httpx.AsyncClient(timeout=120) as client:
            first = await ask(client, 0, 2)
            assert num_running() == 1
            return [first, *await asyncio.gather(*(ask(client, index, 200) for index in range(8)))]

    assert asyncio.run(load()) == [200] * 9
    service.until(lambda: num_running() == 2, "the load has brought a second replica", 20)
    service.until(lambda: num_running() == 0, "idle replicas are gone", 60)
