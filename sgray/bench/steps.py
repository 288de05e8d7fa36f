"""`sgray bench steps`: the kernels of a decode step, how long each takes, and how long the GPU idles between them.

Reads torch's profiler, so it sees what runs inside CUDA graphs. A CUDA device only.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgray.bench import machine, report
from sgray.bench.drive import request_ids
from sgray.bench.workloads import Workload
from sgray.errors import ConfigError
from sgray.flags import add_config_flags, config_from
from sgray.protocol import Request, SamplingParams

if TYPE_CHECKING:
    from sgray.engine.engine import Engine

NUM_STEPS = 32
NUM_SHOWN = 14


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work of the device; times in microseconds on the device's clock."""

    name: str
    start_us: float
    end_us: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's own flags and those of the engine's configuration."""
    parser.add_argument("--batches", default="1,64", help="comma-separated batch sizes (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens before the first step (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.set_defaults(parser=parser)
    add_config_flags(parser, sections=("model", "parallel", "memory", "schedule"))


def run(arguments: argparse.Namespace) -> int:
    """Measures each batch size, prints tables, writes the JSON file. Raises SgrayError."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench steps profiles a GPU, and no CUDA device is visible")
    from sgray.engine.engine import Engine

    engine = Engine.load(config_from(arguments))
    document: dict[str, Any] = {}
    for batch in (int(size) for size in arguments.batches.split(",")):
        document[str(batch)] = figures = summarise(_profile(engine, batch, arguments.length))
        print(f"batch {batch}: {figures['step_us']:.0f} us a step, idle {100 * figures['idle']:.1f} %")
        rows = [(name, one["us"], one["count"], 100 * one["share"]) for name, one in figures["kernels"].items()]
        print(report.table(("kernel", "us a step", "launches", "%"), rows[:NUM_SHOWN]), "\n")
    report.write_json(arguments.json, {"batches": document} | machine.conditions())
    return 0


def summarise(work: Sequence[Work], num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Mean time of a step and of each kernel in it, and the share of the time in which nothing ran.

    Kernels that overlap are counted once in the idle share, and each for itself in its own time.
    """
    ordered = sorted(work, key=lambda one: one.start_us)
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    busy, until = 0.0, float(ordered[0].start_us)
    for one in ordered:
        times[one.name] += one.end_us - one.start_us
        counts[one.name] += 1
        busy += max(0.0, one.end_us - max(until, one.start_us))
        until = max(until, one.end_us)
    total = until - ordered[0].start_us
    kernels = {
        name: {"us": time / num_steps, "count": counts[name] / num_steps, "share": time / total}
        for name, time in sorted(times.items(), key=lambda one: -one[1])
    }
    return {"step_us": total / num_steps, "idle": 1 - busy / total, "kernels": kernels}


def short_name(name: str) -> str:
    """A kernel's name without its template arguments."""
    return re.sub(r"[<(].*", "", name.removeprefix("void "))[-48:]


def _profile(engine: Engine, batch: int, length: int) -> list[Work]:
    """`NUM_STEPS` steps in the middle of a batch that decodes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    prompts = Workload(batch, 1, 0, length, 4 * NUM_STEPS).prompts(random.Random(0), engine.info.vocab_size)
    sampling = SamplingParams(max_new_tokens=4 * NUM_STEPS, temperature=0.0, ignore_eos=True)
    ids = request_ids()
    names = [f"steps-{batch}-{next(ids)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(Request(name, prompt, sampling))
    started: set[str] = set()
    while len(started) < batch:
        started |= {delta.id for delta in engine.step().deltas if delta.tokens}
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    events = profiler.events() or []
    return [
        Work(short_name(event.name), event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
