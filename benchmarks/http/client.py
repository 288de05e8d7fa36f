"""A streaming client for measuring: a fixed number of streams on /v1/completions, spread over several processes.

Closed loop: each stream sends its next request when the last has ended. Prompts are random token ids, answers have a
fixed length. Knows OpenAI's route and nothing of the server behind it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import ClientSession

PROMPT_IDS = (100, 49_000)
TIMEOUT_S = 600


@dataclass(frozen=True)
class Load:
    """`requests` prompts of `prompt_len` ids, `streams` at a time; each stream begins within `spread_s` seconds."""

    prompt_len: int
    output_len: int
    streams: int
    requests: int
    spread_s: float = 0.0


@dataclass
class Answer:
    """One answer as its client saw it, in seconds since it was asked for. A gap lies between two events."""

    begin: float = 0.0  # on the clock that all processes share
    first_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


def drive(url: str, model: str, load: Load, *, num_processes: int, seed: int) -> dict[str, float]:
    """Sends the load and gives the figures; latencies in milliseconds. Raises RuntimeError where an answer failed.

    `out_tok_s` counts from before the processes start, `out_tok_s_asking` from the first request to the last answer.
    """
    count = min(num_processes, load.streams)
    shares = [(url, model, _share(load, count, number), seed + number) for number in range(count)]
    begin = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(count) as pool:
        answers = [answer for part in pool.starmap(_run, shares) for answer in part]
    return figures(load, answers, time.perf_counter() - begin)


def figures(load: Load, answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """What the answers say; an answer has `load.output_len` tokens however many events brought them."""
    first = sorted(answer.first_s for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    steps = load.output_len - 1
    asking_s = max(one.begin + one.total_s for one in answers) - min(one.begin for one in answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "events": len(answers) + len(gaps),
        "tpot_ms": 1e3 * statistics.mean((answer.total_s - answer.first_s) / steps for answer in answers),
        "ttft_ms_p50": 1e3 * quantile(first, 0.5),
        "ttft_ms_p99": 1e3 * quantile(first, 0.99),
        "itl_ms_p50": 1e3 * quantile(gaps, 0.5),
        "itl_ms_p99": 1e3 * quantile(gaps, 0.99),
        "out_tok_s": len(answers) * load.output_len / seconds,
        "out_tok_s_asking": len(answers) * load.output_len / asking_s,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie; 0 where there is none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _share(load: Load, count: int, number: int) -> Load:
    """The part of one process; the parts add up to the whole."""
    streams, requests = ((total + count - 1 - number) // count for total in (load.streams, load.requests))
    return Load(load.prompt_len, load.output_len, streams, requests, load.spread_s)


def _run(url: str, model: str, load: Load, seed: int) -> list[Answer]:
    return asyncio.run(_stream_all(url, model, load, random.Random(seed)))


async def _stream_all(url: str, model: str, load: Load, rng: random.Random) -> list[Answer]:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    numbers = iter(range(load.requests))  # one iterator for all streams: each takes the next request
    answers: list[Answer] = []

    async def stream(session: ClientSession, numbers: Iterator[int]) -> None:
        await asyncio.sleep(rng.uniform(0.0, load.spread_s))
        for _ in numbers:
            answers.append(await _ask(session, url, model, load, rng))

    timeout = ClientTimeout(total=TIMEOUT_S)
    async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0)) as session:
        await asyncio.gather(*(stream(session, numbers) for _ in range(load.streams)))
    return answers


async def _ask(session: ClientSession, url: str, model: str, load: Load, rng: random.Random) -> Answer:
    prompt = [rng.randrange(*PROMPT_IDS) for _ in range(load.prompt_len)]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    begin = last = time.perf_counter()
    answer = Answer(begin)
    is_done = False
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: [DONE"):
                is_done = True
            elif line.startswith(b"data: {"):
                now = time.perf_counter()
                if last == begin:
                    answer.first_s = now - begin
                else:
                    answer.gaps_s.append(now - last)
                last = now
    if not is_done:
        raise RuntimeError("a stream was cut")
    answer.total_s = time.perf_counter() - begin
    return answer
