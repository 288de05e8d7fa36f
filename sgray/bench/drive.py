"""Drives an in-process engine with token-id prompts and notes when tokens came."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgray.errors import EngineError
from sgray.protocol import Delta, EngineInfo, Request, SamplingParams, StepReport


class EngineLike(Protocol):
    """What a benchmark asks of an engine."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> StepReport: ...


@dataclass(slots=True)
class Run:
    """One batch of prompts run to the end; times in seconds since all were handed in."""

    seconds: float = 0.0
    first_s: float = 0.0  # until every request had its first token
    cached_tokens: int = 0
    num_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return sum(self.num_tokens.values())


def request_ids() -> Iterator[str]:
    """Ids that no other benchmark of this process uses."""
    return (f"bench-{number}" for number in itertools.count())


def run_batch(engine: EngineLike, prompts: Sequence[list[int]], output_len: int, ids: Iterator[str]) -> Run:
    """Runs all prompts together, greedily, exactly `output_len` tokens each. Raises EngineError if one falls short."""
    sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
    run = Run()
    begin = time.perf_counter()
    for prompt in prompts:
        request = Request(next(ids), prompt, sampling)
        run.num_tokens[request.id] = 0
        engine.add(request)
    waiting = len(prompts)
    while engine.has_work:
        report = engine.step()
        waiting -= sum(_note(run, delta) for delta in report.deltas)
        if waiting == 0 and run.first_s == 0.0:
            run.first_s = time.perf_counter() - begin
    run.seconds = time.perf_counter() - begin
    if short := [name for name, count in run.num_tokens.items() if count != output_len]:
        raise EngineError(f"{len(short)} of {len(prompts)} requests did not give {output_len} tokens")
    return run


def _note(run: Run, delta: Delta) -> bool:
    """Enters one delta; whether it brought the request's first token."""
    if delta.finish is not None and delta.finish.error is not None:
        raise EngineError(delta.finish.error.message)
    is_first = run.num_tokens[delta.id] == 0 and bool(delta.tokens)
    run.num_tokens[delta.id] += len(delta.tokens)
    run.cached_tokens += delta.cached_tokens or 0
    return is_first
