"""Requests to simulate: when they come, what their prompts are made of, how long their answers are. Traces from files.

A prompt is a list of block numbers: equal numbers stand for equal text, and each block but the last is BLOCK tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgray.errors import ConfigError

BLOCK = 512  # tokens; as in the Mooncake traces


@dataclass(eq=False, slots=True)
class Arrival:
    """One request. `then`, if there is one, comes `gap_s` after this one's answer has ended, whatever its own time."""

    time: float
    num_tokens: int
    num_output: int
    blocks: tuple[int, ...]
    then: Arrival | None = None
    gap_s: float = 0.0

    def prompt(self, grain: int) -> list[int]:
        """Token ids where one id stands for `grain` tokens, a divisor of BLOCK."""
        each = BLOCK // grain
        ids = [block for block in self.blocks for _ in range(each)]
        del ids[-(-self.num_tokens // grain) :]
        return ids


def every(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """These and all that follow from them."""
    found: list[Arrival] = []
    for first in arrivals:
        one: Arrival | None = first
        while one is not None:
            found.append(one)
            one = one.then
    return found


def load_trace(
    path: Path, *, speed: float = 1.0, limit: int | None = None, jitter_s: float = 0.0, seed: int = 0
) -> list[Arrival]:
    """A trace in Mooncake's format (FAST'25): a JSON object a line with `timestamp` in ms, `input_length`,
    `output_length` and `hash_ids`, one for each block of 512 prompt tokens. Played `speed` times as fast.

    `jitter_s` spreads arrivals over that many seconds of the trace, for traces whose clock is coarse. Raises
    ConfigError that names the line.
    """
    rng = random.Random(seed)
    arrivals = []
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"the trace {str(path)!r} cannot be read: {error.strerror}") from None
    for number, line in enumerate(text.splitlines()[:limit], start=1):
        if line.strip():
            one = _parse(line, f"{path}, line {number}")
            one.time = (one.time + rng.random() * jitter_s) / speed
            arrivals.append(one)
    if not arrivals:
        raise ConfigError(f"the trace {str(path)!r} has no requests")
    return sorted(arrivals, key=lambda one: one.time)


def _parse(line: str, place: str) -> Arrival:
    try:
        entry: dict[str, Any] = json.loads(line)
        time_s = float(entry["timestamp"]) / 1000
        num_tokens, num_output = int(entry["input_length"]), int(entry["output_length"])
        blocks = tuple(int(block) for block in entry["hash_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: not a request of a trace ({type(error).__name__}: {error})") from None
    if num_tokens < 1 or len(blocks) != -(-num_tokens // BLOCK):
        raise ConfigError(f"{place}: {num_tokens} tokens are not {len(blocks)} blocks of {BLOCK}")
    return Arrival(time_s, num_tokens, max(1, num_output), blocks)


def pooled_hit_rate(arrivals: Sequence[Arrival], num_blocks: int) -> float:
    """Share of prompt tokens found in one least-recently-used cache with the memory of all replicas together.

    No assignment of requests to replicas with such caches can hit more, but by luck of eviction.
    """
    held: dict[int, None] = {}
    found = total = 0
    for one in sorted(every(arrivals), key=lambda one: one.time):
        depth = next((depth for depth, block in enumerate(one.blocks) if block not in held), len(one.blocks))
        found += min(depth * BLOCK, one.num_tokens - 1)
        total += one.num_tokens
        for block in reversed(one.blocks):
            held.pop(block, None)
            held[block] = None
        while len(held) > num_blocks:
            del held[next(iter(held))]
    return found / max(1, total)
