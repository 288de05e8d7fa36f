"""What following a grammar costs a batch, in pairs of runs that alternate: the same tokens, with and without a mask.

    python benchmarks/grammar_cost.py [--pairs 6] [--batch 8] [--tokens 48]

In each pair one batch is generated under a JSON schema, and one freely with the same length. What is compared is the
CPU time of a decode step: with one thread that is what it takes on a quiet machine, and others' work counts little.
Text that the schema forces is drawn like any other here (log-probabilities switch that off), so that both sides do the
same number of steps; a third run shows what appending it saves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.protocol import Grammar, Request, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}


def main() -> None:
    """Print one line a pair, and the median of the ratios with their spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    engine = Engine.load(
        Config.parse({"model": {"num_threads": arguments.threads}, "memory": {"max_total_tokens": 16384}})
    )
    engine.prepare_grammars()
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    sides = {
        "free": (None, 0),
        "constrained": (grammar, 0),
        "constrained, forced text appended": (grammar, -1),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(arguments.pairs + 1):
        order = list(sides.items())[:: 1 if pair % 2 else -1]
        for name, (side, logprobs) in order:
            seconds = run(engine, side, logprobs, arguments.batch, arguments.tokens)
            if pair:  # the first one is to warm up
                times[name].append(seconds)
                print(f"pair {pair}: {name}: {1000 * seconds:.2f} ms a token of each sequence", flush=True)
    for name in list(sides)[1:]:
        ratios = sorted(mine / free for mine, free in zip(times[name], times["free"], strict=True))
        print(f"{name} / free: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")


def run(engine: Engine, grammar: Grammar | None, logprobs: int, batch: int, num_tokens: int) -> float:
    """Seconds for a token of each sequence, from the first token on."""
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    for index in range(batch):
        engine.add(Request(f"{index}", [40 + index, 300, 301, 302], sampling, grammar=grammar))
    begin, done, counts = time.process_time(), 0, [0] * batch
    while engine.has_work:
        for delta in engine.step().deltas:
            counts[int(delta.id)] += len(delta.tokens)
        if not done and min(counts) > 0:
            begin, done = time.process_time(), sum(counts)
    return (time.process_time() - begin) * batch / (sum(counts) - done)


if __name__ == "__main__":
    main()
