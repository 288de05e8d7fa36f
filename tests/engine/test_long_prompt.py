"""A long prompt beside a stream, on the real engine and the default model in float32."""

from __future__ import annotations

import random
from pathlib import Path

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.protocol import Request, SamplingParams

CHUNK = 128
LONG, ANSWER = 1000, 30


def load(model_dir: Path) -> Engine:
    return Engine.load(
        Config.parse(
            {
                "model": {"model_path": str(model_dir), "device": "cpu", "dtype": "float32"},
                "memory": {"max_total_tokens": 4096, "disable_radix_cache": True},
                "schedule": {"chunked_prefill_size": CHUNK},
            }
        )
    )


def request(name: str, tokens: list[int], count: int) -> Request:
    return Request(name, tokens, SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True))


def tokens_by_step(engine: Engine) -> list[dict[str, list[int]]]:
    steps = []
    while engine.has_work:
        steps.append({delta.id: delta.tokens for delta in engine.step().deltas if delta.tokens})
    return steps


def text(steps: list[dict[str, list[int]]], name: str) -> list[int]:
    return [token for step in steps for token in step.get(name, [])]


def test_a_stream_gets_a_token_in_every_step_of_a_long_prefill_pub_102(model_dir: Path) -> None:
    rng = random.Random(0)
    short, long = ([rng.randrange(1000, 40_000) for _ in range(count)] for count in (20, LONG))
    engine = load(model_dir)
    alone = {}
    for name, tokens, count in (("stream", short, ANSWER), ("long", long, 4)):
        engine.add(request(name, tokens, count))
        alone[name] = text(tokens_by_step(engine), name)

    engine.add(request("stream", short, ANSWER))
    begin = [engine.step() for _ in range(3)]
    engine.add(request("long", long, 4))
    steps = tokens_by_step(engine)

    first = next(number for number, step in enumerate(steps) if "long" in step)
    assert first >= LONG // CHUNK - 1  # the prefill took many steps,
    assert all("stream" in step for step in steps[: first + 1])  # and the stream had its token in each of them
    told = [token for report in begin for delta in report.deltas for token in delta.tokens]
    assert told + text(steps, "stream") == alone["stream"]
    assert text(steps, "long") == alone["long"]
