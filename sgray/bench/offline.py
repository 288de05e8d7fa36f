"""`sgray bench offline`: the named workloads through the in-process engine, without HTTP and without Ray."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from typing import Any

from sgray.bench import report
from sgray.bench.drive import EngineLike, request_ids, run_batch
from sgray.bench.workloads import CPU_FACTOR, Workload, select
from sgray.errors import ConfigError
from sgray.flags import add_config_flags, config_from


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
    defaults = {"model__device": "cpu", "model__dtype": "bfloat16"} if on_cpu else {}
    config = config_from(arguments, **defaults)
    from sgray.engine.engine import Engine

    engine = Engine.load(config)
    document: dict[str, Any] = {"scale": arguments.scale, "model": engine.info.model_name}
    if workloads:
        document["workloads"] = run_workloads(engine, workloads, seed=arguments.seed, repeat=arguments.repeat)
    if on_cpu and not arguments.no_compare:
        from sgray.bench.compare import compare

        document["comparison"] = compare(engine, num_pairs=arguments.pairs)
    report.write_json(arguments.json, document)
    return 0


def run_workloads(
    engine: EngineLike, workloads: Mapping[str, Workload], *, seed: int, repeat: int | None = None
) -> dict[str, dict[str, Any]]:
    """Runs each workload after a warm-up and prints a table; the figures by name."""
    for name, workload in workloads.items():
        if workload.longest > engine.info.context_length:
            raise ConfigError(f"{name} needs {workload.longest} tokens; the context is {engine.info.context_length}")
    rng, ids = random.Random(seed), request_ids()
    warm = Workload(num_groups=4, group_size=1, prefix_len=0, unique_len=32, output_len=8)
    run_batch(engine, warm.prompts(rng, engine.info.vocab_size), warm.output_len, ids)
    header = ("workload", "requests", "in", "out", "cached", "s", "out tok/s", "total tok/s")
    results: dict[str, dict[str, Any]] = {}
    for name, workload in workloads.items():
        runs = []
        for _ in range(repeat or workload.repeats):
            prompts = workload.prompts(rng, engine.info.vocab_size)
            runs.append(run_batch(engine, prompts, workload.output_len, ids))
            print(f"{name}: {runs[-1].seconds:.3f} s", file=sys.stderr)
        best = min(runs, key=lambda one: one.seconds)
        num_input, num_output = sum(map(len, prompts)), best.output_tokens
        results[name] = {
            "reqs": len(prompts),
            "in_tok": num_input,
            "out_tok": num_output,
            "cached_tok": best.cached_tokens,
            "s": best.seconds,
            "all_s": [one.seconds for one in runs],
            "out_tok_s": num_output / best.seconds,
            "total_tok_s": (num_input + num_output) / best.seconds,
        }
    columns = ("reqs", "in_tok", "out_tok", "cached_tok", "s", "out_tok_s", "total_tok_s")
    print(report.table(header, [(name, *(figures[key] for key in columns)) for name, figures in results.items()]))
    return results
