"""Everything that may go wrong with replicas, at random, under a closed loop of callers who check each answer.

`python benchmarks/chaos.py --minutes 6 --seed 1` deploys the service with the default model on this machine, kills,
stops, redeploys and scales its engine replicas, hangs up on some calls, and prints one line of JSON. Its exit status is
0 if every finished answer is what it is undisturbed, nothing but 429 and 503 was refused, no stream broke, and no page
or memory is lost. In float32, since in bfloat16 a greedy choice may depend on what is cached; what is drawn is among
few tokens, since in a whole vocabulary there are many borders for the last bits of a number to cross.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import httpx
from answers import DECLARED, Call, Json, Refused, streamed, whole
from processes import MAX_GROWTH_MIB, Scales, replica_pids
from service import cluster, leaked_pages

from sgray.config import DEFAULT_MODEL
from sgray.launch_server import has_haproxy

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 12}},
    "required": ["names"],
    "additionalProperties": False,
}


@dataclass
class Tally:
    """What became of the calls and what was done to the service."""

    equal: int = 0
    left: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    disturbances: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0


def calls() -> list[Call]:
    """Some of each kind, with answers of 20 to 100 tokens."""
    found: list[Call] = []
    for index in range(6):
        length = 20 + 16 * index
        chat = {"messages": [{"role": "user", "content": f"Tell me story number {index}."}], "max_tokens": length}
        text = {"prompt": f"In the year {1900 + index} the", "max_tokens": length, "ignore_eos": True}
        found += [
            Call(f"chat {index}", "/v1/chat/completions", chat | {"temperature": 0, "ignore_eos": True}),
            Call(f"text {index}", "/v1/completions", text | {"temperature": 0}),
            Call(f"seeded {index}", "/v1/completions", text | {"temperature": 1, "top_k": 20, "seed": index, "n": 2}),
            Call(f"penalised {index}", "/v1/completions", text | {"temperature": 0, "presence_penalty": 0.5}),
            Call(f"stopped {index}", "/v1/completions", text | {"temperature": 0, "stop": ["and s", "\n\n"]}),
            Call(f"logprobs {index}", "/v1/completions", text | {"temperature": 0, "logprobs": 2}),
        ]
    form = {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Names, as JSON."}], "max_tokens": 150, "temperature": 0}
    found.append(Call("json", "/v1/chat/completions", body | {"response_format": form}))
    return [replace(call, body={"model": DEFAULT_MODEL} | call.body) for call in found]


class Callers:
    """Sessions that send one call after the other."""

    def __init__(self, url: str, rng: random.Random, tally: Tally) -> None:
        self._url = url
        self._rng = rng
        self._tally = tally
        self._calls = calls()
        self._expected: dict[str, str] = {}

    async def learn(self) -> None:
        """Get the answers that count, while nothing happens."""
        async with self._client() as client:
            for start in range(0, len(self._calls), 5):
                some = self._calls[start : start + 5]
                answers = await asyncio.gather(*(streamed(client, call) for call in some))
                self._expected |= dict(zip([call.name for call in some], answers, strict=True))

    async def session(self, until: float) -> None:
        """Calls until the time has come."""
        async with self._client() as client:
            while time.monotonic() < until:
                await self._one(client, self._rng.choice(self._calls))

    async def _one(self, client: httpx.AsyncClient, call: Call) -> None:
        tally, begin = self._tally, time.monotonic()
        leave_after = self._rng.randrange(1, 20) if self._rng.random() < 0.15 else None

        def heard(num_events: int) -> None:
            if num_events == leave_after:
                raise _HungUp

        ask = streamed(client, call, heard) if self._rng.random() < 0.8 else whole(client, call)
        try:
            answer = await ask
        except Refused as error:
            tally.refused[error.status] += 1
            if error.status not in DECLARED:
                tally.failed.append(f"{_now()} {call.name}: {error.status} {error}")
            await asyncio.sleep(1)
        except (httpx.HTTPError, RuntimeError) as error:
            tally.failed.append(f"{_now()} {call.name}: {type(error).__name__}: {error}")
            await asyncio.sleep(1)
        except _HungUp:
            tally.left += 1
        else:
            tally.longest_s = max(tally.longest_s, time.monotonic() - begin)
            if answer == self._expected[call.name]:
                tally.equal += 1
            else:
                tally.different.append(f"{_now()} {call.name}: {answer!r} instead of {self._expected[call.name]!r}")

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=200)


class _HungUp(Exception):
    """This caller has left on purpose."""


def _now() -> str:
    return time.strftime("%H:%M:%S")


class Disturber:
    """Does something to the replicas every now and then."""

    def __init__(
        self,
        rng: random.Random,
        tally: Tally,
        deploy: Callable[[int, int], Awaitable[None]],
        pause_s: float,
        usual: int,
    ) -> None:
        self._rng = rng
        self._tally = tally
        self._deploy = deploy
        self._pause_s = pause_s
        self._number = 0
        self._usual = usual

    async def run(self, until: float) -> None:
        """Until the time has come; what was begun is brought to its end."""
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._rng.uniform(0.5, 1.5) * self._pause_s))
            kind = self._rng.choice(["kill", "kill", "stop", "stop", "redeploy", "scale"])
            if pids := replica_pids():
                await self._disturb(kind, self._rng.choice(sorted(pids)))

    async def _disturb(self, kind: str, pid: int) -> None:
        self._tally.disturbances[kind] += 1
        print(f"{_now()} {kind} {pid}", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
            elif kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(2, 14))
                os.kill(pid, signal.SIGCONT)
            elif kind == "redeploy":
                self._number += 1
                await self._deploy(self._number, self._usual)
            else:  # up, then down to one, then as usual
                for replicas in (3, 1, self._usual):
                    await self._deploy(self._number, replicas)
                    await asyncio.sleep(self._rng.uniform(0, 5))


@contextlib.contextmanager
def service(*, haproxy: bool, replicas: int) -> Iterator[tuple[str, Callable[[int, int], None]]]:
    """The service: its URL, and what deploys another configuration in its place."""
    with cluster(haproxy=haproxy) as (url, deploy_args):

        def deploy(number: int, replicas: int) -> None:
            deploy_args(_configuration(number, replicas), None)

        deploy(0, replicas)
        yield url, deploy


def _configuration(number: int, replicas: int) -> Json:
    """The numbers are all that makes one configuration differ from another."""
    return {
        "model": {"dtype": "float32"},
        "memory": {"max_total_tokens": 16_384},
        "schedule": {"max_queued_requests": 1000 + number},
        "serve": {
            "min_replicas": replicas,
            "max_replicas": replicas,
            "num_cpus_per_replica": 0.5,
            "num_cpus_per_ingress": 0.1,
            "health_check_period_s": 1.0,
            "graceful_shutdown_timeout_s": 240.0,  # longer than any answer, however busy the machine
        },
    }


async def run(url: str, deploy: Callable[[int, int], None], arguments: argparse.Namespace) -> Json:
    """One run; the summary."""
    rng, tally, scales = random.Random(arguments.seed), Tally(), Scales()
    callers = Callers(url, random.Random(rng.random()), tally)
    await callers.learn()
    print("undisturbed answers are known", file=sys.stderr, flush=True)
    sampling = asyncio.ensure_future(scales.run())
    until = time.monotonic() + 60 * arguments.minutes

    async def redeploy(number: int, replicas: int) -> None:
        await asyncio.to_thread(deploy, number, replicas)

    disturber = Disturber(rng, tally, redeploy, arguments.pause, arguments.replicas)
    await asyncio.gather(disturber.run(until), *(callers.session(until) for _ in range(arguments.sessions)))
    sampling.cancel()
    return {
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        "sessions": arguments.sessions,
        "disturbances": dict(tally.disturbances),
        "equal": tally.equal,
        "different": tally.different,
        "left": tally.left,
        "refused": dict(tally.refused),
        "failed": tally.failed,
        "longest_s": round(tally.longest_s, 1),
        "leaked_tokens": await asyncio.to_thread(leaked_pages, url),
        "growth_mib": scales.growth(),
    }


def is_good(summary: Json) -> bool:
    """Whether nothing happened that may not happen."""
    grows = max(summary["growth_mib"].values(), default=0.0) > MAX_GROWTH_MIB
    return bool(summary["equal"]) and not (
        summary["different"] or summary["failed"] or summary["leaked_tokens"] or grows
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=6, help="callers at once (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pause", type=float, default=20.0, help="mean seconds between two disturbances")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy")
    arguments = parser.parse_args()
    haproxy = has_haproxy() and not arguments.no_haproxy
    with contextlib.redirect_stdout(sys.stderr), service(haproxy=haproxy, replicas=arguments.replicas) as (url, deploy):
        summary = asyncio.run(run(url, deploy, arguments))
    print(json.dumps(summary))
    return 0 if is_good(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
