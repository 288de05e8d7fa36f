"""How long a plan takes to the other rank of a replica, beside a call of a Ray actor that carries the same bytes.

    python benchmarks/plan_path.py [--steps 600] [--gap-ms 8] [--without-ray]

A plan of some 12 kB is encoded, sent through the pipe of a rank and decoded there, as in a step. The clock, which is
the same for all processes of a machine, runs from before it is encoded: until it is sent, which is what rank 0 pays,
and until the rank has it. A rank on a CPU sleeps until a plan comes, one on a GPU looks for it without a pause for a
while. Plans come soon after each other, and in the pace of decode steps. A Ray actor does the same with the bytes that
it is called with; for it the clock also runs until the caller has the answer, without which a caller does not learn of
an error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sgray.engine.plan import Admission, StepPlan
from sgray.engine.rank import SPIN_S
from sgray.parallel.pipes import receive, send
from sgray.protocol import SamplingParams

CHILD = "import sys; sys.path[:] = sys.argv[2:]; from plan_path import follow; follow(float(sys.argv[1]))"


def main() -> None:
    """Print one line a path and pace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--gap-ms", type=float, default=8.0)
    parser.add_argument("--without-ray", action="store_true")
    arguments = parser.parse_args()
    encoder, plan = msgspec.msgpack.Encoder(), a_plan()
    print(f"a plan of {len(plan.slots)} sequences and {len(plan.tokens)} tokens: {len(encoder.encode(plan))} bytes")
    paces = {"0.5 ms apart": 0.0005, f"{arguments.gap_ms:g} ms apart": arguments.gap_ms / 1000}
    for kind, spin_s in {"CPU": 0.0, "GPU": SPIN_S}.items():
        for pace, gap_s in paces.items():
            sent, there = by_pipe(lambda: encoder.encode(plan), arguments.steps, gap_s, spin_s)
            show(f"pipe to a rank on a {kind}, sent, {pace}", sent)
            show(f"pipe to a rank on a {kind}, there, {pace}", there)
    if arguments.without_ray:
        return
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    rank = ray.remote(Rank).options(num_cpus=1).remote()
    for pace, gap_s in paces.items():
        there, answered = by_actor(rank, lambda: encoder.encode(plan), arguments.steps, gap_s)
        show(f"Ray actor call, there, {pace}", there)
        show(f"Ray actor call, answered, {pace}", answered)
    ray.shutdown()


def a_plan(num_decoding: int = 192, num_prompt: int = 3700) -> StepPlan:
    """A large step: many sequences that decode, and a chunk of one prompt that begins."""
    slots = list(range(num_decoding + 1))
    return StepPlan(
        step=123_456,
        admissions=[Admission(num_decoding, SamplingParams(seed=7), 7, num_prompt // 2, list(range(num_prompt // 2)))],
        slots=slots,
        starts=[1000 + slot for slot in slots[:-1]] + [0],
        lengths=[1] * num_decoding + [num_prompt // 2],
        samples=[True] * (num_decoding + 1),
        new_pages=[(slot, 16, 3000 + slot) for slot in slots[::16]],
        tokens=[30_000 + slot for slot in slots[:-1]] + list(range(num_prompt // 2)),
    )


def follow(spin_s: float) -> None:
    """A rank that does nothing with its plans but note when it has them."""
    decoder = msgspec.msgpack.Decoder(StepPlan)
    times = []
    while raw := receive(0, spin_s):
        decoder.decode(raw)
        times.append(time.monotonic_ns())
        if len(times) == 1:
            os.write(1, b"+")
    os.write(1, msgspec.msgpack.encode(times))


class Rank:
    """The same as an actor."""

    def __init__(self) -> None:
        self.decoder = msgspec.msgpack.Decoder(StepPlan)

    def step(self, raw: bytes) -> int:
        """When it has the plan."""
        self.decoder.decode(raw)
        return time.monotonic_ns()


def by_pipe(encode: Callable[[], bytes], steps: int, gap_s: float, spin_s: float) -> tuple[list[float], list[float]]:
    """Seconds from before a plan is encoded until it is sent, and until the rank has it."""
    paths = [str(Path(__file__).resolve().parent), *sys.path]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(spin_s), *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        pipe = child.stdin.fileno()
        os.set_blocking(pipe, False)
        send(pipe, encode(), 30.0)
        child.stdout.read(1)  # it has begun; the first plan is not counted
        begins, ends = [], []
        for _ in range(steps):
            begins.append(time.monotonic_ns())
            send(pipe, encode(), 30.0)
            ends.append(time.monotonic_ns())
            time.sleep(gap_s)  # the shortest steps are longer, so that no plan waits behind another
        child.stdin.close()
        arrivals: list[int] = msgspec.msgpack.decode(child.stdout.read())
    return between(begins, ends), between(begins, arrivals[1:])


def by_actor(rank: Any, encode: Callable[[], bytes], steps: int, gap_s: float) -> tuple[list[float], list[float]]:
    """The same for an actor's method: until it has the plan, and until the caller knows that."""
    import ray

    ray.get(rank.step.remote(encode()))
    begins, arrivals, ends = [], [], []
    for _ in range(steps):
        begins.append(time.monotonic_ns())
        arrivals.append(ray.get(rank.step.remote(encode())))
        ends.append(time.monotonic_ns())
        time.sleep(gap_s)
    return between(begins, arrivals), between(begins, ends)


def between(begins: list[int], ends: list[int]) -> list[float]:
    """Seconds from each begin to its end, of nanoseconds."""
    return [(end - begin) / 1e9 for begin, end in zip(begins, ends, strict=True)]


def show(name: str, seconds: list[float]) -> None:
    """Median and the 99th percentile in microseconds."""
    ordered = sorted(seconds)
    late = ordered[int(0.99 * (len(ordered) - 1))]
    print(f"{name}: median {1e6 * statistics.median(ordered):.0f} us, p99 {1e6 * late:.0f} us", flush=True)


if __name__ == "__main__":
    main()
