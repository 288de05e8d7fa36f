"""What following a grammar costs a batch, in pairs of runs that alternate: the same tokens, with and without a mask.

    python benchmarks/grammar_cost.py [--pairs 12] [--batch 8] [--tokens 48]

In each pair one batch is generated under a JSON schema, and one freely with the same length. What is compared is the
CPU time of a decode step: with one thread that is what it takes on a quiet machine, and others' work counts little.
Text that the schema forces is drawn like any other here (log-probabilities switch that off), so that both sides do the
same number of steps; a third run, beside the first pairs, shows what appending it saves. The schema becomes a grammar
as one of a request does. Last, the time from a schema of 64 properties to its compiled grammar, a new one each time.
"""

from __future__ import annotations

import argparse
import statistics
import time

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.protocol import Grammar, Request, SamplingParams
from sgray.serve.openai.constraints import constraint_of, grammar_of
from sgray.serve.openai.schemas import ChatBody

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
WITH_APPENDED = 3  # pairs with the third run beside them


def main() -> None:
    """Print one line a pair, and the median of the ratios with their spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    engine = Engine.load(
        Config.parse({"model": {"num_threads": arguments.threads}, "memory": {"max_total_tokens": 16384}})
    )
    engine.prepare_grammars()
    grammar = grammar_of_schema(SCHEMA)
    sides = {
        "free": (None, 0),
        "constrained": (grammar, 0),
        "constrained, forced text appended": (grammar, -1),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(arguments.pairs + 1):
        order = list(sides.items())[: 3 if pair <= WITH_APPENDED else 2][:: 1 if pair % 2 else -1]
        for name, (side, logprobs) in order:
            seconds = run(engine, side, logprobs, arguments.batch, arguments.tokens)
            if pair:  # the first one is to warm up
                times[name].append(seconds)
                print(f"pair {pair}: {name}: {1000 * seconds:.2f} ms a token of each sequence", flush=True)
    for name in list(sides)[1:]:
        ratios = sorted(mine / free for mine, free in zip(times[name], times["free"], strict=False))
        print(f"{name} / free: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    compiles = sorted(1000 * compile_seconds(engine, salt) for salt in range(arguments.pairs))
    print(f"64 properties: median {statistics.median(compiles):.0f} ms, from {compiles[0]:.0f} to {compiles[-1]:.0f}")


def grammar_of_schema(schema: dict[str, object]) -> Grammar:
    """What a chat request with this schema as its `response_format` asks the engine to follow."""
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    messages = [{"role": "user", "content": "Fill in the form."}]
    body = ChatBody.model_validate({"model": "default", "messages": messages, "response_format": form})
    constraint = constraint_of(body)
    assert constraint is not None
    return grammar_of(constraint)


def compile_seconds(engine: Engine, salt: int) -> float:
    """From a schema of 64 strings that was never seen to its first token, less the one step of one prompt token."""
    names = [f"field_{salt}_{index}" for index in range(64)]
    properties: dict[str, object] = {name: {"type": "string"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    engine.add(Request(f"compile-{salt}", [40 + salt], sampling, grammar=grammar_of_schema(schema)))
    finish(engine)
    compiled = time.perf_counter()
    engine.add(Request(f"plain-{salt}", [1040 + salt], sampling))
    finish(engine)
    return 2 * compiled - begin - time.perf_counter()


def finish(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while engine.has_work:
        engine.step()


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
