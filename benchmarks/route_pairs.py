"""Routing policies beside each other on real replicas: the service with the default model, under long sessions.

    python benchmarks/route_pairs.py [--policies cost,round_robin,ray_prefix,ray_router] [--rounds 4] [--json FILE]

Each round deploys the service once for each policy, in an order that turns, and plays the same sessions on it. They are
those of `sgray bench route --workload agentic` with one token where the simulation has sixteen, which is its grain:
applications of unequal popularity with a prompt of 256 to 768 tokens each, and 4 to 25 turns a session that go on from
all that was said before. Here the model's own answers are a part of that. A session that ends makes room for the next.
`ray_prefix` is our writing of the rule of Ray's router, on exact caches; `ray_router` is Ray's own (`ray_router.py`).

What is compared are ratios of one round, of which the median over the rounds is told: how fast a CPU is, and what else
it does in an hour, is in both sides of a pair.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import httpx
from service import Build, Deploy, cluster

from sgray.bench.machine import conditions
from sgray.bench.report import summary, table, write_json
from sgray.bench.route.arrivals import BLOCK, Arrival
from sgray.bench.route.workloads import agentic
from sgray.config import RoutingPolicy
from sgray.errors import ConfigError
from sgray.launch_server import has_haproxy

RAY_ROUTER = "ray_router"
POLICIES = ("cost", "round_robin", "ray_prefix", RAY_ROUTER)
GRAIN = 16  # tokens of the workload for one of ours
BLOCK_TOKENS = BLOCK // GRAIN
TOKEN_IDS = (100, 49_000)
NUM_SESSIONS = 1000  # more than can be played
PAUSE_S = 1.0  # after a failure
TIMEOUT_S = 300.0
COMPARED = ("hit_share", "ttft_s_mean", "ttft_s_p50", "ttft_s_p99", "requests", "tokens_per_s")


@dataclass
class Answer:
    """A call that came to its end."""

    num_prompt: int
    num_cached: int
    tokens: list[int]
    ttft_s: float


@dataclass
class Tally:
    """The calls that began in the time that counts."""

    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Clock:
    """When sessions begin, when calls begin to count, and when no more begin; on the monotonic clock."""

    begin: float
    counts: float
    end: float


class CallError(Exception):
    """There was no whole answer."""


class Sessions:
    """A closed loop: so many sessions at once, each of which sends a turn when it has the answer to the one before."""

    def __init__(self, url: str, seed: int, think: float) -> None:
        self.tally = Tally()
        self._url = url
        self._seed = seed
        self._think = think
        firsts = agentic(random.Random(seed), 1.0, NUM_SESSIONS)
        self._firsts = iter(firsts)  # in one order for all policies, whoever takes the next

    async def play(self, count: int, clock: Clock) -> None:
        """Until the end, and the answers to all that was asked before it."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._seat(client, clock) for _ in range(count)))

    async def _seat(self, client: httpx.AsyncClient, clock: Clock) -> None:
        while time.monotonic() < clock.end:
            await self._session(client, next(self._firsts), clock)

    async def _session(self, client: httpx.AsyncClient, first: Arrival, clock: Clock) -> None:
        said: list[int] = []
        for turn, new_blocks in turns(first):
            await asyncio.sleep(self._think * turn.gap_s)
            if (begin := time.monotonic()) >= clock.end:
                return
            said += [token for block in new_blocks for token in block_tokens(self._seed, block)]
            counts = begin >= clock.counts
            try:
                answer = await ask(client, self._url, said, -(-turn.num_output // GRAIN))
            except (httpx.HTTPError, CallError) as error:
                if counts:
                    self.tally.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)
                return
            if counts:
                self.tally.answers.append(answer)
            said += answer.tokens


def turns(first: Arrival) -> Iterator[tuple[Arrival, tuple[int, ...]]]:
    """The turns of a session, each with the blocks that the one before did not have."""
    turn: Arrival | None = first
    num_known = 0
    while turn is not None:
        yield turn, turn.blocks[num_known:]
        num_known = len(turn.blocks)
        turn = turn.then


def block_tokens(seed: int, block: int) -> list[int]:
    """What a block of the workload is made of."""
    return random.Random(f"{seed} {block}").choices(range(*TOKEN_IDS), k=BLOCK_TOKENS)


async def ask(client: httpx.AsyncClient, url: str, tokens: Sequence[int], num_output: int) -> Answer:
    """One streamed call; raises CallError where it is refused or breaks off."""
    sampling = {"max_new_tokens": num_output, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
    begin, ttft_s, last = time.monotonic(), 0.0, ""
    async with client.stream("POST", f"{url}/generate", json=body) as response:
        if response.status_code != 200:
            raise CallError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.monotonic() - begin
                last = line.removeprefix("data: ")
    told = json.loads(last or "{}")
    if len(told.get("output_ids", ())) != num_output:
        raise CallError(f"the stream ended with {last[:300]!r}")
    meta = told["meta_info"]
    return Answer(meta["prompt_tokens"], meta["cached_tokens"], told["output_ids"], ttft_s)


def figures(tally: Tally, seconds: float) -> dict[str, Any]:
    """What one policy did in the seconds that count; `tokens_per_s` are those of answers."""
    answers = tally.answers
    ttft = summary([answer.ttft_s for answer in answers])
    num_prompt = sum(answer.num_prompt for answer in answers)
    return {
        "requests": len(answers),
        "errors": len(tally.errors),
        "first_errors": tally.errors[:3],
        "prompt_tokens": num_prompt,
        "hit_share": sum(answer.num_cached for answer in answers) / max(1, num_prompt),
        **{f"ttft_s_{name}": value for name, value in ttft.items()},
        "tokens_per_s": sum(len(answer.tokens) for answer in answers) / seconds,
    }


def ratios(rounds: Sequence[Mapping[str, Mapping[str, Any]]], ours: str) -> dict[str, dict[str, float | None]]:
    """Our policy's figures over each other's: medians over the rounds. None where the other's was always 0."""
    found: dict[str, dict[str, float | None]] = {}
    for policy in rounds[0]:
        if policy == ours:
            continue
        found[policy] = {}
        for name in COMPARED:
            pairs = [one[ours][name] / one[policy][name] for one in rounds if one[policy][name]]
            found[policy][name] = statistics.median(pairs) if pairs else None
    return found


def configuration(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The service's, for a policy."""
    return {
        "memory": {"max_total_tokens": arguments.memory_tokens},
        "serve": {
            "routing_policy": "round_robin" if policy == RAY_ROUTER else policy,  # Ray's leaves one candidate
            "min_replicas": arguments.replicas,
            "max_replicas": arguments.replicas,
            "num_cpus_per_replica": 0.5,
            "num_cpus_per_ingress": 0.1,
            "graceful_shutdown_timeout_s": 5.0,
        },
    }


def measure(url: str, deploy: Deploy, policy: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Deploys a policy and gives its figures."""
    deploy(configuration(policy, arguments), _build(policy))
    _await_replicas(url, arguments.replicas)
    sessions = Sessions(url, seed, arguments.think)
    begin = time.monotonic()
    clock = Clock(begin, begin + arguments.warm_s, begin + arguments.warm_s + arguments.seconds)
    asyncio.run(sessions.play(arguments.sessions, clock))
    _delete()
    return figures(sessions.tally, arguments.seconds)


def _build(policy: str) -> Build | None:
    if policy != RAY_ROUTER:
        return None
    import ray_router

    return ray_router.build


def _delete() -> None:
    """All replicas of the next policy start at once where none has to make room."""
    from ray import serve

    from sgray.serve.build import APP_NAME

    serve.delete(APP_NAME)


def _await_replicas(url: str, count: int) -> None:
    """Until the ingress is linked to all replicas."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
            if sum(line.startswith("sgray:num_running_reqs{") for line in lines) == count:
                return
        time.sleep(0.5)
    raise TimeoutError(f"the service does not have {count} replicas after {TIMEOUT_S:.0f} s")


def run(url: str, deploy: Deploy, policies: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds: policy -> figures each."""
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        first = number % len(policies)
        found = {}
        for policy in itertools.chain(policies[first:], policies[:first]):
            begin = time.monotonic()
            found[policy] = measure(url, deploy, policy, arguments.seed + number, arguments)
            told = f"round {number + 1}, {policy}, {time.monotonic() - begin:.0f} s"
            print(told, json.dumps(found[policy]), file=sys.stderr, flush=True)
        rounds.append({policy: found[policy] for policy in policies})
    return rounds


def show(policies: Sequence[str], rounds: Sequence[Mapping[str, Any]], compared: Mapping[str, Any]) -> None:
    """The tables."""
    names = ("hit_share", "ttft_s_mean", "ttft_s_p50", "ttft_s_p99", "tokens_per_s")
    rows = [
        (
            policy,
            *(statistics.median(one[policy][name] for one in rounds) for name in names),
            sum(one[policy]["requests"] for one in rounds),
            sum(one[policy]["errors"] for one in rounds),
        )
        for policy in policies
    ]
    header = ("policy", "hit share", "TTFT mean s", "p50", "p99", "tokens/s", "requests", "errors")
    print(f"medians of {len(rounds)} rounds; requests and errors of all\n{table(header, rows)}")
    ratio_header = (f"{policies[0]} over", "hit share", "TTFT mean", "p50", "p99", "requests", "tokens/s")
    ratio_rows = [(policy, *(found[name] for name in COMPARED)) for policy, found in compared.items()]
    print(f"\nratios, medians of {len(rounds)} pairs\n{table(ratio_header, ratio_rows)}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES), help="by commas; the first over each of the others")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=24, help="at once (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--memory-tokens", type=int, default=8192, help="of a replica (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="that count (default: %(default)s)")
    parser.add_argument("--warm-s", type=float, default=15.0, help="before them (default: %(default)s)")
    parser.add_argument("--think", type=float, default=0.5, help="times the workload's pauses between turns")
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: %(default)s)")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    try:
        policies = _policies(arguments.policies)
        _check(arguments)
    except ConfigError as error:
        parser.error(str(error))
    haproxy = has_haproxy() and not arguments.no_haproxy
    with contextlib.redirect_stdout(sys.stderr), cluster(haproxy=haproxy) as (url, deploy):
        rounds = run(url, deploy, policies, arguments)
    compared = ratios(rounds, policies[0])
    show(policies, rounds, compared)
    write_json(arguments.json, {**conditions(), "arguments": vars(arguments), "ratios": compared, "rounds": rounds})
    return 1 if any(one[policy]["errors"] for one in rounds for policy in policies) else 0


def _policies(text: str) -> list[str]:
    known = (*get_args(RoutingPolicy), RAY_ROUTER)
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"unknown policy {wrong[0]!r}; known are: {', '.join(known)}")
    if len(set(names)) < len(names) or len(names) < 2:
        raise ConfigError("--policies needs at least two names, each once")
    return names


def _check(arguments: argparse.Namespace) -> None:
    for name in ("rounds", "sessions", "replicas"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} must be at least 1")
    if arguments.memory_tokens < 4096:  # the longest sessions come near it
        raise ConfigError("--memory-tokens must be at least 4096")
    if arguments.seconds <= 0 or arguments.warm_s < 0 or arguments.think < 0:
        raise ConfigError("--seconds must be above 0, --warm-s and --think at least 0")


if __name__ == "__main__":
    sys.exit(main())
