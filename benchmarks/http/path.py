"""What a token costs between the engine's thread and the client's socket: real link, ingress, tokenizer and server.

The load comes from a paced source in the place of the engine, which hands every stream one token a step; everything
else is the product's own code, each side in a process of its own, as in a deployment. Knows neither Ray nor models.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import cProfile
import json
import multiprocessing
import random
import resource
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from sgray.config import DEFAULT_MODEL, Config
from sgray.models.hub import resolve_model
from sgray.protocol import Delta, EngineInfo, Load, Request, StepReport
from sgray.serve.dispatch import Dispatcher
from sgray.serve.link import LinkServer
from sgray.serve.openai.app import create_app
from sgray.serve.table import Endpoint
from sgray.text.tokenizer import Tokenizer

LINK_KEY = "path"
INFO = EngineInfo(DEFAULT_MODEL, "", "LlamaForCausalLM", "bfloat16", "cpu", 49_152, 1 << 20, (2,), 64, 4096, 256)


@dataclass(frozen=True)
class Cost:
    """Processor seconds of a process so far, and the tokens that passed it."""

    cpu_s: float
    system_s: float
    tokens: int
    loop_s: float = 0.0
    publish_s: float = 0.0


class PacedSource:
    """Stands where the engine's loop does: every `step_s` one token for each request that is running."""

    def __init__(self, step_s: float) -> None:
        self.tokens = 0
        self.publish_s = 0.0
        self.steps: list[float] = []
        self._step_s = step_s
        self._running: dict[str, bool] = {}  # id, and whether its first delta was sent
        self._lock = threading.Lock()
        self._rng = random.Random(7)

    def submit(self, request: Request) -> None:
        """Called by the link."""
        with self._lock:
            self._running[request.id] = False

    def abort(self, request_id: str) -> None:
        """Called by the link."""
        with self._lock:
            self._running.pop(request_id, None)

    def run(self, server: LinkServer) -> None:
        """Steps for ever, on the calling thread."""
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            deltas = self._deltas()
            report = StepReport(deltas, [], Load(running=len(deltas), steps=len(self.steps)))
            begin = time.thread_time()
            self.steps.append(time.monotonic())
            server.publish(report)
            self.publish_s += time.thread_time() - begin
            self.tokens += len(deltas)

    def _deltas(self) -> list[Delta]:
        with self._lock:
            running = list(self._running.items())
            self._running.update((key, True) for key, _ in running)
        ids = self._rng.choices(range(100, 49_000), k=len(running))
        return [
            Delta(key, [token], None, None, None if started else 0)
            for (key, started), token in zip(running, ids, strict=True)
        ]


def replica(pipe: Connection, step_s: float) -> None:
    """The replica's process: answers each message with its cost so far, and "steps" with the times of all steps."""

    async def main() -> None:
        source = PacedSource(step_s)
        server = LinkServer(source, INFO, LINK_KEY)
        pipe.send(await server.start("127.0.0.1"))
        threading.Thread(target=source.run, args=(server,), daemon=True).start()
        while (asked := await asyncio.to_thread(pipe.recv)) != "end":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s = usage.ru_utime + usage.ru_stime
            cost = Cost(cpu_s, usage.ru_stime, source.tokens, time.thread_time(), source.publish_s)
            pipe.send(source.steps if asked == "steps" else cost)

    uvloop.run(main())


def ingress(pipe: Connection, port: int, profile: str | None, direct: int) -> None:
    """An ingress's process: the application under uvicorn, as Serve runs it, or with `direct` streams of its own."""

    async def main() -> None:
        config = Config.parse({})
        profiler = cProfile.Profile() if profile is not None else None
        tokenizer = Tokenizer.load(resolve_model(DEFAULT_MODEL, progress=False))
        dispatcher = Dispatcher()
        dispatcher.set_replicas({"replica": Endpoint("127.0.0.1", port, LINK_KEY)})
        await dispatcher.wait_known()
        app = create_app(config, tokenizer, dispatcher)
        if direct:
            pipe.send(0)
            received = [0]
            calls = [asyncio.ensure_future(_call(app, received)) for _ in range(direct)]
            await _answer(pipe, profiler, profile, received)
            for call in calls:
                call.cancel()
            return
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await _answer(pipe, profiler, profile, [0])
        serving.cancel()

    uvloop.run(main())


async def _answer(
    pipe: Connection, profiler: cProfile.Profile | None, profile: str | None, received: list[int]
) -> None:
    while (asked := await asyncio.to_thread(pipe.recv)) != "end":
        if profiler is not None and profile is not None:
            profiler.enable() if asked == "begin" else profiler.dump_stats(profile)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(Cost(usage.ru_utime + usage.ru_stime, usage.ru_stime, received[0]))


async def _call(app: Any, received: list[int]) -> None:
    """One stream straight into the application, without a server and sockets."""
    messages = [{"type": "http.request", "body": _body()}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        received[0] += message.get("body", b"").count(b"data: ")

    await app(
        {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}, receive, send
    )


def _body() -> bytes:
    body = {"model": DEFAULT_MODEL, "prompt": [100] * 128, "max_tokens": 1 << 19, "stream": True, "ignore_eos": True}
    return json.dumps(body).encode()


class Streams:
    """Clients that read raw chunks and note when each came."""

    def __init__(self) -> None:
        self.arrivals: list[list[float]] = []
        self.num_events = 0
        self._tasks: list[asyncio.Future[None]] = []

    def check(self) -> None:
        """Raises what ended a stream."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def open(self, port: int, count: int) -> None:
        """Starts `count` streams on one ingress."""
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            raw = _body()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            own: list[float] = []
            self.arrivals.append(own)
            self._tasks.append(asyncio.ensure_future(self._read(reader, writer, own)))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: list[float]) -> None:
        data = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in data:
            raise RuntimeError(data.decode() + (await reader.read(1 << 16)).decode())
        while data := await reader.read(1 << 16):
            own.append(time.monotonic())
            self.num_events += data.count(b"data: ")
        writer.close()


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all processes and gives the figures."""
    context = multiprocessing.get_context("spawn")
    replica_pipe, inner = context.Pipe()
    processes = [context.Process(target=replica, args=(inner, arguments.step_ms / 1e3), daemon=True)]
    processes[0].start()
    link_port = replica_pipe.recv()
    pipes = []
    direct = arguments.streams // arguments.ingresses if arguments.direct else 0
    for number in range(arguments.ingresses):
        pipe, inner = context.Pipe()
        profile = arguments.profile if number == 0 else None
        processes.append(context.Process(target=ingress, args=(inner, link_port, profile, direct), daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    streams = Streams()
    for pipe in pipes:
        port = await asyncio.to_thread(pipe.recv)
        if port:
            await streams.open(port, arguments.streams // arguments.ingresses)
    await asyncio.sleep(1.5)
    streams.check()

    def ask(pipe: Connection, word: str) -> Any:
        pipe.send(word)
        return pipe.recv()

    def mark(word: str) -> tuple[Cost, list[Cost], int, float]:
        costs = [ask(pipe, word) for pipe in pipes]
        return ask(replica_pipe, word), costs, streams.num_events, time.monotonic()

    begin = await asyncio.to_thread(mark, "begin")
    await asyncio.sleep(arguments.seconds)
    end = await asyncio.to_thread(mark, "finish")
    steps = ask(replica_pipe, "steps")
    for process in processes:
        process.kill()
    return figures(begin, end, streams, steps)


def figures(begin: Any, end: Any, streams: Streams, steps: list[float]) -> dict[str, Any]:
    """Costs a token in microseconds, latencies in milliseconds."""
    tokens = end[0].tokens - begin[0].tokens
    seconds = end[3] - begin[3]
    lags, gaps = [], []
    for own in streams.arrivals:
        inside = [at for at in own if begin[3] < at < end[3]]
        lags += [at - steps[bisect.bisect_right(steps, at) - 1] for at in inside]
        gaps += [later - earlier for earlier, later in pairwise(inside)]
    lags.sort()
    gaps.sort()

    def per_token(attribute: str, side: int) -> float:
        pairs = zip(begin[1], end[1], strict=True) if side else [(begin[0], end[0])]
        return 1e6 * sum(getattr(b, attribute) - getattr(a, attribute) for a, b in pairs) / tokens

    return {
        "produced_tok_s": tokens / seconds,
        "received_events_s": (end[2] - begin[2]) / seconds,
        "replica_loop_us": per_token("loop_s", 0),
        "replica_publish_us": per_token("publish_s", 0),
        "replica_process_us": per_token("cpu_s", 0),
        "ingress_us": per_token("cpu_s", 1),
        "ingress_system_us": per_token("system_s", 1),
        "direct_events_s": sum(b.tokens - a.tokens for a, b in zip(begin[1], end[1], strict=True)) / seconds,
        "lag_ms_p50_p99": [1e3 * lags[int(len(lags) * q)] for q in (0.5, 0.99) if lags],
        "gap_ms_p50_p99": [1e3 * gaps[int(len(gaps) * q)] for q in (0.5, 0.99) if gaps],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=16.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--direct", action="store_true", help="call the application without a server and sockets")
    parser.add_argument("--profile", metavar="FILE", help="cProfile of the first ingress")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    found = uvloop.run(measure(arguments))
    print(json.dumps(found, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
