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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgray.bench import machine, report
from sgray.bench.drive import request_ids
from sgray.bench.offline import throughput_config
from sgray.bench.step_limits import DecodeStep, group_of, limits_us
from sgray.bench.workloads import Workload
from sgray.errors import ConfigError
from sgray.flags import add_config_flags
from sgray.models.spec import ModelSpec
from sgray.protocol import Request, SamplingParams

if TYPE_CHECKING:
    from sgray.engine.engine import Engine

NUM_STEPS = 32
WARM_STEPS = 4
NUM_SHOWN = 14


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work of the device; times in microseconds on the device's clock."""

    name: str
    start_us: float
    end_us: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's own flags and those of the engine's configuration."""
    parser.add_argument("--batches", default="1,64,256", help="comma-separated batch sizes (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens before the first step (default: %(default)s)")
    parser.add_argument(
        "--prefix", type=int, default=0, help="of these, tokens that all sequences share (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.set_defaults(parser=parser)
    add_config_flags(parser, sections=("model", "parallel", "memory", "schedule"))


def run(arguments: argparse.Namespace) -> int:
    """Measures each batch size, prints tables, writes the JSON file. Raises SgrayError."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench steps profiles a GPU, and no CUDA device is visible")
    if not 0 <= arguments.prefix < arguments.length:
        raise ConfigError("--prefix must be less than --length")
    from sgray.bench.kernel_rig import Rig, full_sizes
    from sgray.bench.kernel_rows import matmul_tflop_s, read_gb_s
    from sgray.bench.stopwatch import Stopwatch
    from sgray.engine.engine import Engine

    device = torch.device("cuda", torch.cuda.current_device())
    rig = Rig(device, full_sizes(), Stopwatch(device))
    ceilings = {"read_gb_s": read_gb_s(rig), "matmul_tflop_s": matmul_tflop_s(rig)}
    torch.cuda.empty_cache()
    engine = Engine.load(throughput_config(arguments))
    if _spec_of(engine).sparsity is not None:
        raise ConfigError("bench steps knows no limits for mixtures of experts; take a model without")
    document: dict[str, Any] = {}
    for batch in (int(size) for size in arguments.batches.split(",")):
        figures = summarise(_profile(engine, batch, arguments.length, arguments.prefix))
        limits = limits_us(_decode_step(engine, batch, arguments.length, arguments.prefix), **ceilings)
        document[str(batch)] = figures | {"groups": grouped(figures["kernels"], limits)}
        _show(batch, document[str(batch)])
    report.write_json(arguments.json, {"batches": document, "ceilings": ceilings} | machine.conditions())
    return 0


def _show(batch: int, figures: dict[str, Any]) -> None:
    print(f"batch {batch}: {figures['step_us']:.0f} us a step, idle {100 * figures['idle']:.1f} %")
    rows = [(name, one["us"], one["count"], 100 * one["share"]) for name, one in figures["kernels"].items()]
    print(report.table(("kernel", "us a step", "launches", "%"), rows[:NUM_SHOWN]))
    groups = [
        (name, one["us"], one["limit_us"], one["us"] - one["limit_us"]) for name, one in figures["groups"].items()
    ]
    print(report.table(("group", "us a step", "limit us", "more"), groups), "\n")


def grouped(kernels: dict[str, dict[str, float]], limits: dict[str, float]) -> dict[str, dict[str, float]]:
    """The time of each group of kernels beside its limit."""
    times = dict.fromkeys(limits, 0.0)
    for name, one in kernels.items():
        times[group_of(name)] += one["us"]
    return {name: {"us": times[name], "limit_us": limit} for name, limit in limits.items()}


def _spec_of(engine: Engine) -> ModelSpec:
    return ModelSpec.read(Path(engine.info.model_dir))


def _decode_step(engine: Engine, batch: int, length: int, prefix: int) -> DecodeStep:
    """The step in the middle of those that are profiled."""
    spec = _spec_of(engine)
    middle = length + WARM_STEPS + NUM_STEPS // 2
    return DecodeStep(
        batch=batch,
        num_keys=prefix + batch * (middle - prefix),
        hidden=spec.hidden_size,
        inner=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab_size,
    )


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


def _profile(engine: Engine, batch: int, length: int, prefix: int) -> list[Work]:
    """`NUM_STEPS` steps in the middle of a batch that decodes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    workload = Workload(1, batch, prefix, length - prefix, 4 * NUM_STEPS)
    prompts = workload.prompts(random.Random(batch), engine.info.vocab_size)
    sampling = SamplingParams(max_new_tokens=4 * NUM_STEPS, temperature=0.0, ignore_eos=True)
    ids = request_ids()
    names = [f"steps-{batch}-{next(ids)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(Request(name, prompt, sampling))
    started: set[str] = set()
    while len(started) < batch:
        started |= {delta.id for delta in engine.step().deltas if delta.tokens}
    for _ in range(WARM_STEPS):
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
