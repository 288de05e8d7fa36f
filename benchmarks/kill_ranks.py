"""Kills ranks of replicas that share a model, one a round, under streams whose undisturbed answers are known.

`python benchmarks/kill_ranks.py --rounds 50 --seed 1 --json FILE` deploys two replicas of several CPU ranks each on
this machine. A round kills a further rank of one of them, or the replica itself, which is rank 0, or stops a rank, so
that it is stuck and not dead. Then every stream has to end as if nothing had been, the rest of the hit gang to be gone
soon, another gang to take its place, and nothing to be left behind: no process, store, shared memory, placement group
or page. A line a round on stderr, at the end one of JSON, and a status of 0 only if all of that was so.

The default model on three ranks as in configs/tp3-cpu.yaml, in float32; rounds are short with a model that is tiny:

    python benchmarks/kill_ranks.py --model benchmarks/models/tiny-vocab-49152 --tp 2 --load-format dummy \\
        --tokenizer-path smollm2-135m-instruct --tokens 400
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from answers import DECLARED, Call, Json, Refused, streamed
from processes import MAX_GROWTH_MIB, Gang, Scales, gangs, has_ended, helpers, orphans
from service import cluster, figures, leaked_pages

from sgray.config import DEFAULT_MODEL
from sgray.launch_server import has_haproxy

NUM_REPLICAS = 2
MODEL_NAME = "model"
DEATH_S = 10.0  # for a gang to go once one of it is dead or stuck
TIDY_S = 10.0  # for what is behind a gang that has gone
POLL_S = 0.05
LOOK_S = 0.25  # between two looks at all processes
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written


@dataclass(frozen=True)
class Blow:
    """One way to break a gang."""

    name: str
    signal: signal.Signals
    is_first: bool  # it hits rank 0, which is the replica


BLOWS = (
    Blow("kill rank", signal.SIGKILL, is_first=False),
    Blow("kill replica", signal.SIGKILL, is_first=True),
    Blow("stop rank", signal.SIGSTOP, is_first=False),
)


@dataclass
class Round:
    """What became of one gang."""

    blow: str
    pid: int  # of the process that was hit
    num_cut: int = 0  # sequences that it worked on
    death_s: float | None = None  # until its last rank was gone
    return_s: float | None = None  # until another one could be asked
    problems: list[str] = field(default_factory=list)


def calls(num_tokens: int) -> list[Call]:
    """Three that are greedy and one that is drawn, with prompts of more than a page."""
    tale = (
        "Once upon a time there was a small village at the edge of a deep forest, and nobody who lived there had ever"
    )
    text: Json = {"model": MODEL_NAME, "max_tokens": num_tokens, "ignore_eos": True}
    asked = {"messages": [{"role": "user", "content": f"How does this go on? {tale}"}]}
    return [
        Call("chat", "/v1/chat/completions", text | asked | {"temperature": 0}),
        Call("text", "/v1/completions", text | {"prompt": f"{tale} left it", "temperature": 0}),
        Call("logprobs", "/v1/completions", text | {"prompt": f"{tale} seen the sea", "temperature": 0, "logprobs": 1}),
        Call("drawn", "/v1/completions", text | {"prompt": tale, "temperature": 1, "top_k": 20, "seed": 7}),
    ]


class Streams:
    """A session for each call, which streams it again and again, and what became of the answers."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.equal = 0
        self.different: list[str] = []
        self.failed: list[str] = []
        self.refused: Counter[int] = Counter()
        self._client = httpx.AsyncClient(base_url=url, timeout=200)
        self._calls = calls(num_tokens)
        self._expected: dict[str, str] = {}
        self._num_ended: Counter[str] = Counter()
        self._num_events: dict[str, int] = {}  # of the stream that runs
        self._is_ending = False

    async def learn(self) -> None:
        """Get the answers that count, each alone. Raises RuntimeError where they depend on what runs beside them."""
        alone = [await streamed(self._client, call) for call in self._calls]
        together = await asyncio.gather(*(streamed(self._client, call) for call in self._calls))
        if alone != together:
            raise RuntimeError(f"undisturbed answers differ: {alone} alone, {together} side by side")
        self._expected = dict(zip([call.name for call in self._calls], alone, strict=True))

    async def run(self) -> None:
        """Until `end` is called and the last stream has ended."""
        await asyncio.gather(*map(self._session, self._calls))
        await self._client.aclose()

    def end(self) -> None:
        """Begin no stream any more."""
        self._is_ending = True

    async def in_the_middle(self) -> None:
        """Wait until half of the sessions have read a part of an answer."""
        while sum(number > 1 for number in self._num_events.values()) < len(self._calls) / 2:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    def ends(self) -> dict[str, int]:
        """How many streams each session has ended once the one that it reads now has."""
        return {name: self._num_ended[name] + 1 for name in self._num_events}

    async def settle(self, due: Mapping[str, int]) -> None:
        """Wait until the sessions have ended so many streams."""
        while any(self._num_ended[name] < number for name, number in due.items()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _session(self, call: Call) -> None:
        while not self._is_ending:
            self._num_events[call.name] = 0
            is_answered = await self._ask(call)
            del self._num_events[call.name]
            self._num_ended[call.name] += 1
            if not is_answered:
                await asyncio.sleep(1)

    async def _ask(self, call: Call) -> bool:
        def heard(number: int) -> None:
            self._num_events[call.name] = number

        try:
            answer = await streamed(self._client, call, heard)
        except Refused as error:
            self.refused[error.status] += 1
            if error.status not in DECLARED:
                self.failed.append(f"{call.name}: {error.status} {error}")
            return False
        except (httpx.HTTPError, RuntimeError) as error:
            self.failed.append(f"{time.strftime('%H:%M:%S')} {call.name}: {type(error).__name__}: {error}")
            return False
        if answer == self._expected[call.name]:
            self.equal += 1
        else:
            self.different.append(f"{call.name}: {answer} instead of {self._expected[call.name]}")
        return True


class Remains:
    """What gangs could leave behind. Made while all is well."""

    def __init__(self, temp_dir: Path, tp_size: int) -> None:
        self._temp_dir = temp_dir
        self._num_processes = NUM_REPLICAS * tp_size
        self._files = set(SHARED_MEMORY.iterdir())
        self._num_groups = _num_groups()

    def left(self) -> list[str]:
        """What is too much or too little although two gangs are there and there was time to see to it."""
        deadline = time.monotonic() + TIDY_S
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return [f"leak: {one}" for one in found]

    def _found(self) -> list[str]:
        found = [f"store {path.name}" for path in self._temp_dir.glob("sgray-ranks-*")]
        found += [f"shared memory {path.name}" for path in SHARED_MEMORY.iterdir() if path not in self._files]
        found += [f"process {_named(process)}" for process in orphans(self._temp_dir)]
        num_processes = sum(len(gang.processes) for gang in gangs())
        if num_processes != self._num_processes:
            found.append(f"{num_processes} processes instead of {self._num_processes}")
        if (num_groups := _num_groups()) != self._num_groups:
            found.append(f"{num_groups} placement groups instead of {self._num_groups}")
        return found


def _num_groups() -> int:
    from ray.util import placement_group_table  # it reads the environment when it is imported

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


class Rounds:
    """Breaks one gang after the other and looks what comes of it."""

    def __init__(
        self, url: str, rng: random.Random, streams: Streams, remains: Remains, arguments: argparse.Namespace
    ) -> None:
        self.done: list[Round] = []
        self._url = url
        self._rng = rng
        self._streams = streams
        self._remains = remains
        self._num_ranks = arguments.tp - 1
        self._limit_s = arguments.limit
        self._blows = _blows(rng, arguments.rounds)

    async def run(self) -> None:
        """All of them, or as many as there are two gangs for."""
        for blow in self._blows:
            done = await self._round(blow)
            self.done.append(done)
            print(f"{time.strftime('%H:%M:%S')} round {len(self.done)}: {_line(done)}", file=sys.stderr, flush=True)
            if done.return_s is None:
                return

    async def _round(self, blow: Blow) -> Round:
        await asyncio.wait_for(self._streams.in_the_middle(), self._limit_s)
        await asyncio.sleep(self._rng.uniform(0, 1))
        running = await asyncio.to_thread(_running, self._url)
        gang = self._rng.choice(await asyncio.to_thread(gangs))
        process = gang.replica if blow.is_first else self._rng.choice(gang.ranks)
        done = Round(blow.name, process.pid)
        due = self._streams.ends()
        process.send_signal(blow.signal)
        begin = time.monotonic()
        await asyncio.gather(self._death(done, gang, begin), self._return(done, gang, begin, running))
        await self._streams.settle(due)
        done.problems += await asyncio.to_thread(self._remains.left)
        return done

    async def _death(self, done: Round, gang: Gang, begin: float) -> None:
        while left := [process for process in gang.processes if not has_ended(process)]:
            if time.monotonic() - begin > DEATH_S:
                done.problems.append(f"after {DEATH_S:g} s there still is {', '.join(map(_named, left))}")
                return
            await asyncio.sleep(POLL_S)
        done.death_s = time.monotonic() - begin

    async def _return(self, done: Round, gang: Gang, begin: float, running: dict[str, float]) -> None:
        while time.monotonic() - begin < self._limit_s:
            is_whole = await asyncio.to_thread(_are_whole, gang, self._num_ranks)
            names = set(await asyncio.to_thread(_running, self._url)) if is_whole else set()
            if len(names) == NUM_REPLICAS and len(names - running.keys()) == 1:
                done.return_s = time.monotonic() - begin
                done.num_cut = int(sum(number for name, number in running.items() if name not in names))
                return
            await asyncio.sleep(LOOK_S)
        done.problems.append(f"there is no other gang after {self._limit_s:g} s")


def _blows(rng: random.Random, num_rounds: int) -> Iterator[Blow]:
    """Every kind equally often, in any order."""
    found = [BLOWS[number % len(BLOWS)] for number in range(num_rounds)]
    rng.shuffle(found)
    return iter(found)


def _running(url: str) -> dict[str, float]:
    """The replicas that can be asked, and how many sequences each of them computes; none where nobody tells."""
    try:
        return figures(url).get("sgray:num_running_reqs", {})
    except httpx.HTTPError:
        return {}


def _are_whole(dead: Gang, num_ranks: int) -> bool:
    """Whether this gang is gone and each other one has all of its ranks."""
    found = gangs()
    is_gone = all(map(has_ended, dead.processes))
    return is_gone and len(found) == NUM_REPLICAS and all(len(gang.ranks) == num_ranks for gang in found)


def _named(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.name()} {process.pid} ({process.status()})"
    return str(process.pid)


def _line(done: Round) -> str:
    death = "not gone" if done.death_s is None else f"gone after {done.death_s:.1f} s"
    back = "not back" if done.return_s is None else f"back after {done.return_s:.1f} s"
    return f"{done.blow} {done.pid}, {done.num_cut} sequences cut: {'; '.join([death, back, *done.problems])}"


async def run(url: str, remains: Callable[[], Remains], arguments: argparse.Namespace) -> Json:
    """All rounds; the summary."""
    streams, scales, begin = Streams(url, arguments.tokens), Scales(), time.monotonic()
    while len(await asyncio.to_thread(_running, url)) < NUM_REPLICAS:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    await streams.learn()
    print(f"undisturbed answers are known after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    begin = time.monotonic()
    sampling, streaming = asyncio.ensure_future(scales.run()), asyncio.ensure_future(streams.run())
    rounds = Rounds(url, random.Random(arguments.seed), streams, await asyncio.to_thread(remains), arguments)
    try:
        await rounds.run()
    finally:
        streams.end()
    await streaming
    sampling.cancel()
    return {
        "model": arguments.model,
        "tp_size": arguments.tp,
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        **_told(rounds.done),
        "equal": streams.equal,
        "different": streams.different,
        "failed": streams.failed,
        "refused": dict(streams.refused),
        "leaked_tokens": await asyncio.to_thread(leaked_pages, url),
        "growth_mib": scales.growth(),
    }


def _told(rounds: list[Round]) -> Json:
    """What the rounds come to."""
    deaths: dict[str, list[float]] = {blow.name: [] for blow in BLOWS}
    returns: dict[str, list[float]] = {blow.name: [] for blow in BLOWS}
    for done in rounds:
        deaths[done.blow] += [done.death_s] if done.death_s is not None else []
        returns[done.blow] += [done.return_s] if done.return_s is not None else []
    return {
        "rounds": dict(Counter(done.blow for done in rounds)),
        "cut": sum(done.num_cut for done in rounds),
        "death_s": {name: _spread(some) for name, some in deaths.items() if some},
        "return_s": {name: _spread(some) for name, some in returns.items() if some},
        "problems": [f"round {number}: {one}" for number, done in enumerate(rounds, 1) for one in done.problems],
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 1), "max": round(max(seconds), 1)}


def is_good(summary: Json, num_rounds: int) -> bool:
    """Whether all rounds were played, streams were cut in them, and nothing happened that may not happen."""
    grows = max(summary["growth_mib"].values(), default=0.0) > MAX_GROWTH_MIB
    is_tried = sum(summary["rounds"].values()) == num_rounds and summary["equal"] and summary["cut"]
    faults = ("problems", "different", "failed", "leaked_tokens")
    return bool(is_tried) and not grows and not any(summary[name] for name in faults)


def _configuration(arguments: argparse.Namespace) -> Json:
    model: Json = {"model_path": arguments.model, "served_model_name": MODEL_NAME, "load_format": arguments.load_format}
    if arguments.tokenizer_path is not None:
        model["tokenizer_path"] = arguments.tokenizer_path
    return {
        "model": model | {"dtype": "float32", "device": "cpu"},
        "parallel": {"tp_size": arguments.tp},
        "memory": {"max_total_tokens": 16_384},
        "serve": {
            "min_replicas": NUM_REPLICAS,
            "max_replicas": NUM_REPLICAS,
            "num_cpus_per_replica": 0.25,
            "num_cpus_per_ingress": 0.1,
        },
    }


def _left_behind(temp_dir: Path) -> list[str]:
    """Processes that are there although their service has ended; they are ended too."""
    deadline = time.monotonic() + TIDY_S
    while (left := helpers(temp_dir)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    named = [f"leak: after the end of the service there is {_named(process)}" for process in left]
    for process in left:
        process.kill()
    return named


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line here too")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or a directory (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=3, help="ranks of a replica (default: %(default)s)")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, the same in each replica")
    parser.add_argument("--tokenizer-path", metavar="PATH", help="where the model has no tokenizer of its own")
    parser.add_argument("--tokens", type=int, default=64, help="length of each answer (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds in which a gang has to be back")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy")
    arguments = parser.parse_args()
    if arguments.tp < 2:
        parser.error("--tp: a gang has at least 2 ranks")
    if (directory := Path(arguments.model)).is_dir():
        arguments.model = str(directory.resolve())  # the service works elsewhere
    return arguments


def main() -> int:
    """The command."""
    arguments = _parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is ended too
    haproxy = has_haproxy() and not arguments.no_haproxy
    with tempfile.TemporaryDirectory(prefix="sgray-kr-", ignore_cleanup_errors=True) as directory:
        temp_dir, left = Path(directory), list[str]()
        try:
            with contextlib.redirect_stdout(sys.stderr), cluster(haproxy=haproxy, temp_dir=temp_dir) as (url, deploy):
                deploy(_configuration(arguments), None)
                summary = asyncio.run(run(url, lambda: Remains(temp_dir, arguments.tp), arguments))
        finally:
            left += _left_behind(temp_dir)
    summary["problems"] += left
    line = json.dumps(summary)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")
    return 0 if is_good(summary, arguments.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
