"""What a token costs on its way through the whole service: engine loop, link, ingress, Serve's HAProxy, client.

A replay stands where the model does: it answers each plan with fixed tokens after a fixed time. All else is the
product, started as `scripts/serve` starts it. Beside it runs what one writes first with Ray Serve: a deployment that
yields events through a StreamingResponse. Processor time is that of all processes of the service together, Ray's
included and the clients' not; a gap lies between two pieces that a client reads. On a machine that others use as well
the rate may not be held, and each token is dearer: the load average is told for that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvloop

from sgray.config import DEFAULT_MODEL
from sgray.engine.plan import StepPlan, StepResult
from sgray.launch_server import READY, free_ports
from sgray.protocol import EngineInfo

if TYPE_CHECKING:
    from ray.serve import Application

    from sgray.config import Config
    from sgray.engine.engine import Engine

ROOT = Path(__file__).parents[1]
PAGE_SIZE = 64
CONTEXT = 8192
PROMPT_TOKENS = 64
START_S = 240.0
STEP_VARIABLE = "TOKEN_PATH_STEP_S"  # of the replica's process: the configuration is the product's, and knows no replay


# ---- in the service's processes


class Replay:
    """An executor without a model: each step takes `step_s` from when the one before it ended, as on a device."""

    depth = 1
    reads_shared = False

    def __init__(self, step_s: float, *, seed: int = 7) -> None:
        self._step_s = step_s
        self._tokens = random.Random(seed).choices(range(100, 49_000), k=4096)
        self._plans: deque[tuple[StepPlan, float]] = deque()
        self._ends = 0.0

    def fault(self) -> str | None:
        """Nothing breaks here."""
        return None

    def close(self) -> None:
        """Nothing to give back."""

    def submit(self, plan: StepPlan) -> None:
        """Begin a step."""
        self._ends = max(self._ends, time.monotonic()) + self._step_s
        self._plans.append((plan, self._ends))

    def collect(self) -> StepResult:
        """Wait for the oldest step; the tokens of a row follow from its slot and its length."""
        plan, ends = self._plans.popleft()
        time.sleep(max(0.0, ends - time.monotonic()))
        rows = zip(plan.slots, plan.starts, plan.lengths, plan.samples, strict=True)
        tokens = [
            self._tokens[(37 * slot + start + length) % 4096] if samples else -1
            for slot, start, length, samples in rows
        ]
        nothing = [None] * len(tokens)
        return StepResult(plan.step, tokens, list(nothing), list(nothing))

    def reset(self) -> None:
        """Drop what is in flight."""
        self._plans.clear()


def replay_engine(config: Config, step_s: float) -> Engine:
    """The product's engine over a replay."""
    from sgray.engine.engine import Engine
    from sgray.models.hub import resolve_model

    directory = resolve_model(config.model.model_path, progress=False)
    running = config.schedule.max_running_requests
    assert isinstance(running, int), "the benchmark sets it"
    num_pages = running * (CONTEXT // PAGE_SIZE)
    info = EngineInfo(
        config.model_name,
        str(directory),
        "LlamaForCausalLM",
        "bfloat16",
        "cpu",
        49_152,
        CONTEXT,
        (2,),
        PAGE_SIZE,
        num_pages,
        running,
    )
    return Engine(Replay(step_s), info, config)


def product(args: Mapping[str, Any]) -> Application:
    """The product's application, with a replay in its replicas."""
    import sgray.serve.build as building
    from sgray.serve import replica

    class ReplayReplica(replica.LLMReplica):
        """The replica over a replay."""

        async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
            from sgray.serve import replica

            step_s = float(os.environ[STEP_VARIABLE])
            replica._load = lambda config, nodes: replay_engine(config, step_s)
            await super().__init__(values)

    building.LLMReplica = ReplayReplica  # type: ignore[misc]
    return building.build(args)


def naive(args: Mapping[str, Any]) -> Application:
    """What one writes first."""
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse

    step_s = float(os.environ[STEP_VARIABLE])

    async def events(count: int) -> AsyncIterator[str]:
        due = 0.0
        for number in range(count):
            due = max(due, time.monotonic()) + step_s  # as the replay: a step that is late makes all later ones late
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            choice = {"index": 0, "text": f" word{number}", "logprobs": None, "finish_reason": None}
            chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    @serve.deployment(max_ongoing_requests=10_000)
    class Naive:
        """Yields events."""

        async def __call__(self, request: Request) -> Response:
            if request.method == "GET":
                return PlainTextResponse("ok")
            body = await request.json()
            return StreamingResponse(events(body["max_tokens"]), media_type="text/event-stream")

    return Naive.bind()  # type: ignore[attr-defined]


# ---- the service from outside


@contextlib.contextmanager
def running(build: str, arguments: argparse.Namespace, *, haproxy: bool) -> Iterator[tuple[int, int]]:
    """A service while it runs: its process and its port."""
    port = free_ports(1)[0]
    args = {
        "schedule": {"max_running_requests": arguments.streams},
        "memory": {"page_size": PAGE_SIZE},
        "serve": {"num_ingress_replicas": arguments.ingresses},
    }
    application = {"name": "sgray", "route_prefix": "/", "import_path": f"token_path:{build}", "args": args}
    document = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    environment = {
        **os.environ,
        STEP_VARIABLE: str(arguments.step_ms / 1e3),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        "RAY_AUTH_MODE": "disabled",
    }
    with tempfile.TemporaryDirectory(prefix="token-path-") as scratch:
        serve_file, log = Path(scratch, "serve.yaml"), Path(scratch, "log")
        serve_file.write_text(json.dumps(document))  # JSON is YAML
        command = [sys.executable, "-m", "sgray", "serve", "--serve-file", str(serve_file)]
        with log.open("wb") as file:
            flags = [] if haproxy else ["--no-haproxy"]
            process = subprocess.Popen([*command, *flags], env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            _await_ready(process, log)
            yield process.pid, port
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.read_text(errors='replace')[-4000:]}") from error
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while READY not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the service did not start:\n" + log.read_text(errors="replace")[-4000:])
        time.sleep(0.2)


@dataclass(frozen=True)
class Usage:
    """Processor seconds of the service's processes so far, by what they are."""

    seconds: Mapping[str, float]

    def since(self, before: Usage) -> dict[str, float]:
        """What was used in between, the most first."""
        used = {name: value - before.seconds.get(name, 0.0) for name, value in self.seconds.items()}
        return dict(sorted(used.items(), key=lambda item: -item[1]))


def usage(root: int) -> Usage:
    """The processor time of a process and all that came from it."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks
    found: dict[str, float] = {}
    for pid in used:
        above = pid
        while above not in (root, 0):
            above = parents.get(above, 0)
        if above == root:
            name = _name(pid)
            found[name] = found.get(name, 0.0) + used[pid]
    return Usage(found)


def _name(pid: int) -> str:
    """What a process is for."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        for mark, name in (
            (":Ingress", "ingress"),
            (":LLMReplica", "replica"),
            (":Naive", "naive replica"),
            ("haproxy", "haproxy"),
            ("ProxyActor", "proxy"),
            ("HAProxy", "proxy"),
            ("ServeController", "controller"),
        ):
            if mark in line:
                return name
    return "other"


class Client(asyncio.Protocol):
    """One stream: sends the request, and notes when each piece came and how many events were in it."""

    def __init__(self, body: bytes, pieces: list[tuple[float, int]]) -> None:
        self._body = body
        self._pieces = pieces
        self.error: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        writer = cast("asyncio.Transport", transport)  # uvloop's only behaves like one
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        writer.write(head + str(len(self._body)).encode() + b"\r\n\r\n" + self._body)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if not self._pieces and b" 200 " not in data[:20]:
            self.error = data[:500].decode(errors="replace")
        self._pieces.append((time.monotonic(), data.count(b"data: ")))


async def open_stream(
    port: int, pieces: list[tuple[float, int]], arguments: argparse.Namespace
) -> tuple[asyncio.Transport, Client]:
    """One more stream, which lasts longer than what is measured."""
    count = CONTEXT - PROMPT_TOKENS
    prompt = [random.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)]
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": count, "stream": True, "ignore_eos": True}
    raw = json.dumps(body).encode()
    await asyncio.sleep(0.002)
    return await asyncio.get_running_loop().create_connection(lambda: Client(raw, pieces), "127.0.0.1", port)


async def all_started(streams: Sequence[Sequence[object]]) -> float:
    """The seconds until something has come on each stream; raises RuntimeError where that takes too long."""
    begin = time.monotonic()
    while not all(streams):
        if time.monotonic() - begin > START_S:
            raise RuntimeError(f"only {sum(map(bool, streams))} of {len(streams)} streams began")
        await asyncio.sleep(0.01)
    return time.monotonic() - begin


async def measure(root: int, port: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one service under load."""
    idle = usage(root)
    await asyncio.sleep(arguments.idle_s)
    idle_share = sum(usage(root).since(idle).values()) / arguments.idle_s
    streams: list[list[tuple[float, int]]] = [[] for _ in range(arguments.streams)]
    clients = [await open_stream(port, own, arguments) for own in streams]
    started = await all_started(streams)
    await asyncio.sleep(arguments.warm_s)
    begin, before, own = time.monotonic(), usage(root), time.process_time()
    await asyncio.sleep(arguments.seconds)
    end, used, own = time.monotonic(), usage(root).since(before), time.process_time() - own
    for transport, client in clients:
        if client.error is not None:
            raise RuntimeError(client.error)
        transport.abort()
    return figures(streams, begin, end, used) | {
        "started_s": started,
        "idle_cores": idle_share,
        "cores": len(os.sched_getaffinity(root)),
        "load_average": os.getloadavg()[0],
        "client_cores": own / (end - begin),
        "step_ms": arguments.step_ms,
        "streams": arguments.streams,
    }


def figures(
    streams: Sequence[Sequence[tuple[float, int]]], begin: float, end: float, used: Mapping[str, float]
) -> dict[str, Any]:
    """What the clients read in the window, and what it cost."""
    inside = [[(at, count) for at, count in own if begin <= at <= end] for own in streams]
    tokens = sum(count for own in inside for _, count in own)
    gaps = sorted(1e3 * (later - earlier) for own in inside for (earlier, _), (later, _) in pairwise(own))
    if not tokens or not gaps:
        raise RuntimeError("no tokens came in the time that was measured")
    return {
        "tokens_per_s": tokens / (end - begin),
        "us_per_token": 1e6 * sum(used.values()) / tokens,
        "us_per_token_by_process": {name: 1e6 * value / tokens for name, value in used.items() if value > 0},
        "itl_ms_p50": gaps[len(gaps) // 2],
        "itl_ms_p99": gaps[int(0.99 * len(gaps))],
    }


def show(name: str, found: Mapping[str, Any]) -> None:
    """The figures for people."""
    parts = ", ".join(f"{part} {value:.0f}" for part, value in found["us_per_token_by_process"].items() if value >= 0.5)
    wanted = found["streams"] * 1e3 / found["step_ms"]
    print(
        f"{name}: {found['streams']} streams at {found['step_ms']:g} ms a step\n"
        f"  {found['tokens_per_s']:.0f} tokens/s of {wanted:.0f}\n"
        f"  {found['us_per_token']:.1f} us a token ({parts})\n"
        f"  between pieces p50 {found['itl_ms_p50']:.1f} ms, p99 {found['itl_ms_p99']:.1f} ms\n"
        f"  idle before: {found['idle_cores']:.2f} cores; the clients: {found['client_cores']:.2f} cores; "
        f"on {found['cores']} cores; load average of the machine: {found['load_average']:.1f} on {os.cpu_count()}",
        flush=True,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-s", type=float, default=4.0, help="from the last stream's start to the measurement")
    parser.add_argument("--idle-s", type=float, default=3.0, help="for the use of processors without load")
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--only", choices=["product", "naive"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for build, haproxy in (("product", True), ("naive", False)):
        if arguments.only in (None, build):
            with running(build, arguments, haproxy=haproxy) as (root, port):
                found[build] = uvloop.run(measure(root, port, arguments))
            show(build, found[build])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
