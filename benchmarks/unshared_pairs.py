"""What the search for shared prefixes costs where there are none: the same load on two engines in turns.

One looks for runs of keys that several sequences hold, as always; the other never does. Both are in this process, with
random weights of the model's shapes, and no two prompts have a token in common. The ratio of a pair is the seconds of
the one that looks over the seconds of the one that does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import sgray.engine.engine as engine_module
from sgray.bench import machine
from sgray.bench.drive import request_ids, run_batch
from sgray.bench.offline import warm_ups
from sgray.bench.workloads import CPU_FACTOR, offline_workloads
from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.engine.executor import measure_hardware

WORKLOADS = {"bs16_isl1024_osl257": 8, "bs64_isl1024_osl257": 8, "bs256_isl128_osl512": 4}  # and how many pairs
NEVER = 0


def load(config: Config, min_saved: int) -> Engine:
    """An engine that looks for what saves so many keys, or never."""
    usual = engine_module.MIN_SAVED
    engine_module.MIN_SAVED = min_saved
    try:
        return Engine.load(config)
    finally:
        engine_module.MIN_SAVED = usual


def compare(factor: int, values: dict[str, Any]) -> dict[str, Any]:
    """Seconds of both and their ratios, by workload."""
    config = Config.parse(values).resolve(measure_hardware())
    engines = [load(config, engine_module.MIN_SAVED), load(config, NEVER)]
    vocab_size, ids, rng = engines[0].info.vocab_size, request_ids(), random.Random(0)
    for engine in engines:
        for warm in warm_ups(engine.info.device):
            run_batch(engine, warm.prompts(rng, vocab_size), warm.output_len, ids)
    found: dict[str, Any] = {}
    for name, num_pairs in WORKLOADS.items():
        workload = offline_workloads()[name].scaled(factor)
        pairs = []
        for number in range(num_pairs):
            prompts = [workload.prompts(rng, vocab_size) for _ in engines]
            order = [0, 1] if number % 2 else [1, 0]
            seconds = {
                side: run_batch(engines[side], prompts[side], workload.output_len, ids).seconds for side in order
            }
            pairs.append((seconds[0], seconds[1]))
        ratios = [looks / never for looks, never in pairs]
        found[name] = {"looks_never_s": pairs, "ratios": ratios, "median": statistics.median(ratios)}
        print(f"{name}: median of {num_pairs} ratios {found[name]['median']:.4f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/models/llama-3.1-8b")
    parser.add_argument("--scale", choices=("full", "cpu"), default="full", help=f"cpu divides by {CPU_FACTOR}")
    parser.add_argument("--max-total-tokens", type=int, default=160_000, help="of each engine (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    values = {
        "model": {
            "model_path": arguments.model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "context_length": 2048,
        },
        "memory": {"max_total_tokens": arguments.max_total_tokens},
    }
    found = compare(CPU_FACTOR if arguments.scale == "cpu" else 1, values)
    text = json.dumps({"workloads": found} | machine.conditions(), indent=1)
    print(text) if arguments.json is None else arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
