"""Two engines: prompts with a common prefix meet on one, and the death of one leaves the service answering."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import openai
import psutil
import pytest

from sgray.config import DEFAULT_MODEL

Deploy = Callable[[Mapping[str, Any]], Any]

NUM_GROUPS, NUM_EACH = 8, 4
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


def replica_pids() -> list[int]:
    """The processes of the engine replicas on this machine that belong to this session."""
    return [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:sgray:LLMReplica" in process.name() or "LLMReplica" in " ".join(process.cmdline()[:1])
    ]


def test_round_robin_finds_less_than_routing_by_cost(deploy: Deploy) -> None:
    spread = deploy({"min_replicas": 2, "max_replicas": 2, "routing_policy": "round_robin"})
    # An odd number of groups would let them take turns on the replicas; each group meets both within its four calls.
    by_turns = asyncio.run(found_share(spread.url, "a"))
    placed = deploy({"min_replicas": 2, "max_replicas": 2})
    by_cost = asyncio.run(found_share(placed.url, "b"))
    used = placed.figures()["sgray:engine_requests"]
    assert by_cost >= 0.85, (by_cost, by_turns)
    assert by_turns <= by_cost - 0.1, (by_cost, by_turns)
    assert min(used.values()) >= NUM_GROUPS * NUM_EACH / 8, f"one replica did nearly everything: {used}"
    placed.assert_idle()


def test_pub_126_a_killed_replica_breaks_its_streams_and_nothing_else(deploy: Deploy) -> None:
    service = deploy({"min_replicas": 2, "max_replicas": 2})
    client = service.openai(max_retries=0)
    pids = replica_pids()
    assert len(pids) == 2
    ends: list[str] = []
    started = threading.Barrier(7)

    def read_long(index: int) -> None:
        body = service.body(f"Story number {index}: tell me everything.", max_tokens=400)
        try:
            stream = client.chat.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
            next(stream)
            started.wait(60)
            chunks = list(stream)
            ends.append("whole" if chunks[-1].choices[0].finish_reason else "cut in silence")
        except openai.APIError as error:
            ends.append(f"error: {error}")

    readers = [threading.Thread(target=read_long, args=(index,)) for index in range(6)]
    for reader in readers:
        reader.start()
    started.wait(60)
    os.kill(pids[0], signal.SIGKILL)
    killed = time.monotonic()
    for index in range(20):
        answer = client.chat.completions.create(**service.body(f"Name fruit {index}.", max_tokens=4))
        assert answer.choices[0].finish_reason
    for reader in readers:
        reader.join(120)
    assert len(ends) == 6, "a reader hangs"
    assert "cut in silence" not in ends
    assert any(end.startswith("error") for end in ends), ends
    assert "whole" in ends, ends

    def replaced() -> bool:
        return pids[0] not in replica_pids() and len(service.figures()["sgray:num_running_reqs"]) == 2

    while not replaced():
        assert time.monotonic() - killed < 90, "the dead replica was not replaced"
        time.sleep(0.2)
    service.assert_idle()


@pytest.mark.parametrize("index", range(4))
def test_the_replacement_works(deploy: Deploy, index: int) -> None:
    client = openai.OpenAI(base_url="http://127.0.0.1:28100/v1", api_key="none", timeout=60)
    body = {"model": DEFAULT_MODEL, "prompt": f"Number {index} is", "max_tokens": 4, "temperature": 0}
    assert client.completions.create(**body).usage
