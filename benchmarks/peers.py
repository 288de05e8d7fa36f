"""The offline workloads on another engine, installed in an environment of its own, on the same machine.

    pip install sglang     # or vllm; and this project without dependencies: pip install --no-deps -e .
    python benchmarks/peers.py sglang --model benchmarks/models/llama-3.1-8b --json sglang.json

Prompts, lengths and the clock are those of `sgray bench offline`; both engines take token ids and give back as many as
they are asked for. Settings are those of the figures in `sgray/bench/peers.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sgray.bench.offline import warm_ups
from sgray.bench.workloads import Workload, select

Generate = Callable[[list[list[int]], int], list[int]]
"""Runs prompts together for so many tokens each; how many each gave."""

VOCAB_SIZE = 128_256
CONTEXT_LENGTH = 40_000


def open_sglang(model: str) -> Generate:
    """SGLang's engine with random weights."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        mem_fraction_static=0.85,
        context_length=CONTEXT_LENGTH,
        log_level="warning",
    )

    def generate(prompts: list[list[int]], count: int) -> list[int]:
        sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0}
        answers = engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
        return [len(answer["output_ids"]) for answer in answers]

    return generate


def open_vllm(model: str) -> Generate:
    """vLLM's engine with random weights."""
    import vllm

    engine = vllm.LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.88,
        max_model_len=CONTEXT_LENGTH,
        enable_prefix_caching=True,
        max_num_seqs=512,
    )

    def generate(prompts: list[list[int]], count: int) -> list[int]:
        sampling = vllm.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    return generate


ENGINES: Mapping[str, Callable[[str], Generate]] = {"sglang": open_sglang, "vllm": open_vllm}


def measure(generate: Generate, workloads: Mapping[str, Workload], seed: int = 0) -> dict[str, float]:
    """The best time of each workload in seconds, after a warm-up. ValueError if an answer has another length."""
    rng = random.Random(seed)
    for warm in warm_ups("cuda"):
        generate(warm.prompts(rng, VOCAB_SIZE), warm.output_len)
    found: dict[str, float] = {}
    for name, workload in workloads.items():
        times = []
        for _ in range(workload.repeats):
            prompts = workload.prompts(rng, VOCAB_SIZE)
            begin = time.perf_counter()
            counts = generate(prompts, workload.output_len)
            times.append(time.perf_counter() - begin)
            if set(counts) != {workload.output_len}:
                raise ValueError(f"{name}: answers of {min(counts)} to {max(counts)} tokens")
        found[name] = min(times)
        print(f"{name}: {found[name]:.3f} s", flush=True)
    return found


def main() -> None:
    """Measures and writes {"engine", "workloads": {name: seconds}}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", required=True, help="a directory with config.json")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated workloads")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    figures = measure(ENGINES[arguments.engine](arguments.model), select(arguments.only, 1))
    arguments.json.write_text(json.dumps({"engine": arguments.engine, "workloads": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
