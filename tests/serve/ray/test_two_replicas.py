"""Two engines: prompts with a common prefix meet on one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from sgray.config import DEFAULT_MODEL

Deploy = Callable[[Mapping[str, Any]], Any]

NUM_GROUPS, NUM_EACH = 7, 4  # odd, so that a group meets both replicas when they take turns
SHARED_WORDS = 120


def grouped_prompts(salt: str) -> list[tuple[int, str]]:
    """Groups that share a long beginning, one of each group after the other."""
    return [
        (group, f"{salt} group {group}: " + f"word{group} " * SHARED_WORDS + f"and question {index}?")
        for index in range(NUM_EACH)
        for group in range(NUM_GROUPS)
    ]


async def found_share(url: str, salt: str) -> float:
    """Of the prompt tokens that an earlier prompt of the group had, the share that was found cached."""
    asked: dict[int, int] = {}
    found = possible = 0
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(group: int, prompt: str) -> tuple[int, int, int]:
            body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            answer = await client.post(f"{url}/v1/completions", json=body)
            usage = answer.json()["usage"]
            return group, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        prompts = grouped_prompts(salt)
        for start in range(0, len(prompts), 4):  # four callers at a time
            for group, total, cached in await asyncio.gather(*(ask(*item) for item in prompts[start : start + 4])):
                if asked.get(group):
                    found += cached
                    possible += total
                asked[group] = asked.get(group, 0) + 1
    return found / possible


@pytest.fixture(scope="module")
def share_by_turns(deploy: Deploy) -> float:
    """What is found where replicas take turns."""
    service = deploy({"min_replicas": 2, "max_replicas": 2, "routing_policy": "round_robin"})
    return asyncio.run(found_share(service.url, "a"))


@pytest.fixture(scope="module")
def service(deploy: Deploy, share_by_turns: float) -> Any:
    """The service that the other tests use."""
    return deploy({"min_replicas": 2, "max_replicas": 2})


def test_routing_by_cost_finds_what_taking_turns_misses(service: Any, share_by_turns: float) -> None:
    by_cost = asyncio.run(found_share(service.url, "b"))
    used = service.figures()["sgray:engine_requests"]
    assert by_cost >= 0.85, (by_cost, share_by_turns)
    assert share_by_turns <= by_cost - 0.15, (by_cost, share_by_turns)
    assert min(used.values()) >= NUM_GROUPS * NUM_EACH / 7, f"one replica did nearly everything: {used}"
    service.assert_idle()
