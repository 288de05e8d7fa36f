"""`sgray bench offline`: the named workloads through the in-process engine, without HTTP and without Ray.

Where the model's shapes are those on which SGLang and vLLM were measured, their figures are printed beside.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sgray.bench import machine, peers, report
from sgray.bench.drive import EngineLike, request_ids, run_batch
from sgray.bench.workloads import CPU_FACTOR, Workload, select
from sgray.config import Config
from sgray.errors import ConfigError
from sgray.flags import add_config_flags, config_from

MIXED_LEAF = "schedule.mixed_prefill_size"
COLUMNS = {
    "requests": "reqs",
    "in": "in_tok",
    "out": "out_tok",
    "cached": "cached_tok",
    "s": "s",
    "out tok/s": "out_tok_s",
    "total tok/s": "total_tok_s",
}
CPU_DEFAULTS = {"model__device": "cpu", "model__dtype": "bfloat16"}
FIRST, MANY = "bs1_isl1024_osl1", "bs1_isl1024_osl257"  # their difference is 256 steps of one sequence


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's own flags and those of the engine's configuration."""
    parser.add_argument("--scale", choices=("full", "cpu"), default="full", help=f"cpu divides by {CPU_FACTOR}")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated workloads; 'none' for the comparison alone")
    parser.add_argument("--repeat", type=int, help="runs of each workload, instead of its own number")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--no-compare", action="store_true", help="with --scale cpu: leave transformers out")
    parser.add_argument("--pairs", type=int, default=5, help="paired runs of the comparison (default: %(default)s)")
    parser.set_defaults(parser=parser)
    add_config_flags(parser, sections=("model", "parallel", "memory", "schedule"))


def run(arguments: argparse.Namespace) -> int:
    """Runs what the flags ask for, prints tables, writes the JSON file. Raises SgrayError."""
    on_cpu = arguments.scale == "cpu"
    workloads = {} if arguments.only == "none" else select(arguments.only, CPU_FACTOR if on_cpu else 1)
    config = throughput_config(arguments, **(CPU_DEFAULTS if on_cpu else {}))
    from sgray.engine.engine import Engine

    engine = Engine.load(config)
    document: dict[str, Any] = {"scale": arguments.scale, "model": engine.info.model_name, "dtype": engine.info.dtype}
    if workloads:
        document["workloads"] = run_workloads(engine, workloads, seed=arguments.seed, repeat=arguments.repeat)
        if not on_cpu:
            print(beside_peers(document["workloads"], has_peers=peers.is_comparable(engine.info)))
    if on_cpu and not arguments.no_compare:
        from sgray.bench.compare import compare

        document["comparison"] = compare(engine, num_pairs=arguments.pairs)
    report.write_json(arguments.json, document | machine.conditions())
    return 0


def throughput_config(arguments: argparse.Namespace, **defaults: object) -> Config:
    """The configuration of the flags, every auto decided. `defaults` are for `config_from`.

    Nobody reads a stream here, so the prefill of a step that also decodes is as large as any other unless its flag is
    given: that costs latency between tokens, which is not measured, and gains throughput, which is.
    """
    from sgray.engine.executor import measure_hardware

    config = config_from(arguments, **defaults).resolve(measure_hardware())
    if MIXED_LEAF in vars(arguments):
        return config
    schedule = config.schedule.model_copy(update={"mixed_prefill_size": config.schedule.chunked_prefill_size})
    return config.model_copy(update={"schedule": schedule})


def run_workloads(
    engine: EngineLike, workloads: Mapping[str, Workload], *, seed: int, repeat: int | None = None
) -> dict[str, dict[str, Any]]:
    """Runs each workload after a warm-up and prints a table; the figures by name."""
    for name, workload in workloads.items():
        if workload.longest > engine.info.context_length:
            raise ConfigError(f"{name} needs {workload.longest} tokens; the context is {engine.info.context_length}")
    rng, ids = random.Random(seed), request_ids()
    for warm in warm_ups(engine.info.device):
        run_batch(engine, warm.prompts(rng, engine.info.vocab_size), warm.output_len, ids)
    results = {
        name: _figures(engine, name, workload, repeat or workload.repeats, rng, ids)
        for name, workload in workloads.items()
    }
    rows = [(name, *(figures[key] for key in COLUMNS.values())) for name, figures in results.items()]
    print(report.table(("workload", *COLUMNS), rows))
    return results


def warm_ups(device: str) -> Sequence[Workload]:
    """What runs before the clock does. On a GPU the same as the peers had, so that the prompts are the same too."""
    if device == "cuda":
        return [_plain(64, 512, 16), _plain(1, 512, 16)]
    return [_plain(4, 32, 8)]


def _plain(count: int, unique_len: int, output_len: int) -> Workload:
    return Workload(num_groups=count, group_size=1, prefix_len=0, unique_len=unique_len, output_len=output_len)


def _figures(
    engine: EngineLike, name: str, workload: Workload, repeats: int, rng: random.Random, ids: Iterator[str]
) -> dict[str, Any]:
    """The best of `repeats` runs, each with prompts of its own."""
    runs = []
    for _ in range(repeats):
        prompts = workload.prompts(rng, engine.info.vocab_size)
        runs.append(run_batch(engine, prompts, workload.output_len, ids))
        print(f"{name}: {runs[-1].seconds:.3f} s", file=sys.stderr)
    best = min(runs, key=lambda one: one.seconds)
    num_input, num_output = sum(map(len, prompts)), best.output_tokens
    return {
        "reqs": len(prompts),
        "in_tok": num_input,
        "out_tok": num_output,
        "cached_tok": best.cached_tokens,
        "s": best.seconds,
        "all_s": [one.seconds for one in runs],
        "out_tok_s": num_output / best.seconds,
        "total_tok_s": (num_input + num_output) / best.seconds,
    }


def beside_peers(results: Mapping[str, Mapping[str, Any]], *, has_peers: bool) -> str:
    """Time per token of one sequence; where they may be compared the peers' seconds. A ratio above 1: we are faster."""
    lines = []
    if has_peers:
        rows = [
            (name, figures["s"], figures["out_tok_s"], pair.sglang, pair.vllm, pair.best / figures["s"])
            for name, figures in results.items()
            if (pair := peers.OFFLINE_S.get(name)) is not None
        ]
        header = ("workload", "sgray s", "out tok/s", "sglang s", "vllm s", "best peer / sgray")
        lines += ["", *(f"{engine} {version}" for engine, version in peers.ENGINES.items())]
        lines += [f"on {peers.CONDITIONS}", report.table(header, rows)]
    tpot = {"sgray": token_ms({name: figures["s"] for name, figures in results.items()})}
    if has_peers:
        tpot |= {
            engine: token_ms({name: getattr(pair, engine) for name, pair in peers.OFFLINE_S.items()})
            for engine in peers.ENGINES
        }
    if tpot["sgray"] is not None:
        lines.append("time per token, one sequence: " + ", ".join(f"{who} {ms:.2f} ms" for who, ms in tpot.items()))
    return "\n".join(lines)


def token_ms(seconds: Mapping[str, float]) -> float | None:
    """Milliseconds a step of one sequence after 1024 tokens, from the two workloads that differ by 256 steps."""
    if FIRST not in seconds or MANY not in seconds:
        return None
    return (seconds[MANY] - seconds[FIRST]) / 256 * 1e3
