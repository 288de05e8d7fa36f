"""`sgray bench serve`: streaming load on a server over HTTP, and what its clients saw.

Closed loop keeps a fixed number of requests in flight; open loop sends at random (Poisson) times whatever the server
does, which is what strangers do. Knows OpenAI's two streaming routes and nothing of this engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sgray.bench import report
from sgray.bench.workloads import Workload
from sgray.config import client_key
from sgray.errors import ConfigError
from sgray.flags import add_key_flags

if TYPE_CHECKING:
    from aiohttp import ClientSession

WORDS = "river stone cloud paper window garden silver morning letter bridge winter candle harbor forest music mirror"


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times in seconds since it was sent."""

    first_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to ask."""

    url: str
    model: str
    chat: bool
    output_len: int
    ignore_eos: bool
    timeout_s: float
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def route(self) -> str:
        return self.url.rstrip("/") + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self, prompt: list[int] | str) -> dict[str, Any]:
        """The request for one prompt: token ids for completions, text for chat."""
        asked: dict[str, Any] = {"prompt": prompt}
        if self.chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        return asked | {
            "model": self.model,
            "max_tokens": self.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add_key_flags(parser)
    parser.add_argument("--model", help="the model's name; the first that the server lists if unset")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument("--num-requests", type=int, default=64, help="of the random workload (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=256, help="own prompt tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="answer tokens (default: %(default)s)")
    parser.add_argument("--groups", type=int, help="shared-prefix workload: number of groups")
    parser.add_argument("--group-size", type=int, default=8, help="requests a group (default: %(default)s)")
    parser.add_argument("--prefix-len", type=int, default=1000, help="tokens a group shares (default: %(default)s)")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=16, help="closed loop: requests in flight (default: 16)")
    loop.add_argument("--rate", type=float, help="open loop: requests a second, Poisson")
    parser.add_argument("--stop-at-eos", action="store_true", help="let answers end early")
    parser.add_argument("--vocab-size", type=int, default=49_000, help="prompt ids are below this (default: 49000)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one request (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of prompts and times; new ones if unset, which no earlier run cached")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")


def run(arguments: argparse.Namespace) -> int:
    """Sends the load, prints tables; 1 if a request failed. Raises ConfigError if there is no server."""
    figures = measure(arguments)
    print(render(figures))
    report.write_json(arguments.json, figures)
    return 1 if figures["errors"] else 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends the load; all figures. Raises ConfigError if there is no server."""
    key = client_key(arguments.api_key, arguments.key_file)
    target = Target(
        arguments.url,
        arguments.model or first_model(arguments.url, key),
        arguments.chat,
        arguments.output_len,
        not arguments.stop_at_eos,
        arguments.timeout_s,
        key,
    )
    rng = random.Random(arguments.seed)
    prompts = make_prompts(arguments, rng)
    begin = time.perf_counter()
    outcomes = asyncio.run(_load(target, prompts, arguments.rate, arguments.concurrency, rng))
    return summarise(outcomes, time.perf_counter() - begin)


def make_prompts(arguments: argparse.Namespace, rng: random.Random) -> list[list[int] | str]:
    """Prompts of the asked workload, requests of different groups mixed; text (about as long) for chat."""
    workload = Workload(arguments.num_requests, 1, 0, arguments.input_len, arguments.output_len)
    if arguments.groups:
        sizes = (arguments.groups, arguments.group_size, arguments.prefix_len, arguments.input_len)
        workload = Workload(*sizes, arguments.output_len, shuffled=True)
    prompts = workload.prompts(rng, arguments.vocab_size)
    if not arguments.chat:
        return list(prompts)
    words = WORDS.split()
    return [" ".join(words[token % len(words)] for token in prompt) for prompt in prompts]


def first_model(url: str, key: str | None = None) -> str:
    """The first model that the server lists; raises ConfigError if it does not answer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"no OpenAI-style server answers at {url}: {error}") from None


def summarise(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """All figures; latencies in milliseconds, over the requests that succeeded."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    output_tokens = sum(outcome.output_tokens for outcome in good)
    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    several = [outcome for outcome in good if outcome.output_tokens > 1]
    return {
        "requests": len(outcomes),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        "seconds": seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (input_tokens + output_tokens) / seconds,
        "ttft_ms": report.summary([1e3 * outcome.first_s for outcome in good]),
        "itl_ms": report.summary([1e3 * gap for outcome in good for gap in outcome.gaps_s]),
        "tpot_ms": report.summary([1e3 * (one.total_s - one.first_s) / (one.output_tokens - 1) for one in several]),
        "latency_ms": report.summary([1e3 * outcome.total_s for outcome in good]),
        "cached_share_percent": report.summary(
            [100 * outcome.cached_tokens / max(1, outcome.prompt_tokens) for outcome in good]
        ),
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as text."""
    spread = {
        "time to first token, ms": "ttft_ms",
        "between events, ms": "itl_ms",
        "per output token, ms": "tpot_ms",
        "whole request, ms": "latency_ms",
        "cached prompt share, %": "cached_share_percent",
    }
    rows = [(title, *figures[key].values()) for title, key in spread.items()]
    failed = sum(figures["errors"].values())
    return "\n".join(
        (
            f"{figures['requests']} requests in {figures['seconds']:.2f} s, {failed} failed",
            *(f"  {count} x {error}" for error, count in figures["errors"].items()),
            f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output tokens/s, "
            f"{figures['total_tokens_per_s']:.1f} tokens/s in all",
            report.table(("", "mean", "p50", "p90", "p99"), rows),
        )
    )


async def _load(
    target: Target, prompts: Sequence[list[int] | str], rate: float | None, concurrency: int, rng: random.Random
) -> list[Outcome]:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    timeout = ClientTimeout(total=target.timeout_s)
    async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0), headers=target.headers) as session:
        if rate is not None:
            return await _open_loop(session, target, prompts, rate, rng)
        return await _closed_loop(session, target, prompts, concurrency)


async def _open_loop(
    session: ClientSession, target: Target, prompts: Sequence[list[int] | str], rate: float, rng: random.Random
) -> list[Outcome]:
    tasks = []
    due = time.perf_counter()
    for prompt in prompts:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(session, target, prompt)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def _closed_loop(
    session: ClientSession, target: Target, prompts: Sequence[list[int] | str], concurrency: int
) -> list[Outcome]:
    waiting: Iterator[list[int] | str] = iter(prompts)
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for prompt in waiting:  # one iterator for all workers: each takes the next prompt
            outcomes.append(await ask(session, target, prompt))

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(prompts)))))
    return outcomes


async def ask(session: ClientSession, target: Target, prompt: list[int] | str) -> Outcome:
    """Sends one request and reads its stream to the end; a failure is an outcome too."""
    from aiohttp import ClientError

    outcome = Outcome()
    begin = time.perf_counter()
    try:
        async with session.post(target.route, json=target.body(prompt)) as answer:
            if answer.status != 200:
                outcome.error = f"HTTP {answer.status}"
                return outcome
            await _read(answer.content, outcome, begin)
    except asyncio.TimeoutError:
        outcome.error = "timeout"
    except (ClientError, OSError) as error:
        outcome.error = type(error).__name__
    return outcome


async def _read(lines: AsyncIterable[bytes], outcome: Outcome, begin: float) -> None:
    last = begin
    done = False
    async for line in lines:
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        if line.startswith(b"data: [DONE"):
            done = True
        elif b'"error"' in line and b'"choices"' not in line:
            outcome.error = "error event"
        elif usage := _usage(line):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        elif not _has_text(line):
            continue
        elif last == begin:
            outcome.first_s = now - begin
            last = now
        else:
            outcome.gaps_s.append(now - last)
            last = now
    outcome.total_s = last - begin
    if not done and outcome.error is None:
        outcome.error = "stream cut"


def _has_text(line: bytes) -> bool:
    """Whether the event brings text, or the tokens that a server without a tokenizer has in its place.

    Chat's opening event, which only says who speaks, and the closing one bring nothing.
    """
    choice = (json.loads(line[6:]).get("choices") or [{}])[0]
    return bool(choice.get("text") or choice.get("token_ids") or choice.get("delta", {}).get("content"))


def _usage(line: bytes) -> dict[str, Any] | None:
    """The usage of the event that has no choices; a cheap look first, for there is one a stream."""
    if b'"usage"' not in line or b'"choices":[]' not in line.replace(b" ", b""):
        return None
    event: dict[str, Any] = json.loads(line[6:])
    usage: dict[str, Any] | None = event.get("usage")
    return usage
