"""Paired comparison with transformers' `generate`: same weights, same type, same threads, runs taken in turn.

A pair is one run of each, next to each other in time, in an order that alternates; the figure is the median of the
pairs' ratios, so that a slow phase of the machine touches both sides.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from sgray.bench import report
from sgray.bench.drive import EngineLike, request_ids, run_batch

FIRST_ID = 1000  # ordinary tokens start here in the usual vocabularies
DECODE_PROMPT_LEN, DECODE_STEPS = 64, 64
CACHED_PROMPT_LEN = 2000


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until the first token of every request, and for each further step."""

    first_s: float
    step_s: float


class TransformersSide:
    """The same model directory in transformers, driven through `generate`."""

    def __init__(self, model_dir: str, dtype: torch.dtype) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    def run(self, prompts: Sequence[list[int]], output_len: int) -> Times:
        """Greedy, exactly `output_len` tokens; all prompts have one length."""
        inputs = torch.tensor(prompts)
        clock = _Clock()
        with torch.inference_mode():
            clock.begin()
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([clock]),
            )
        return clock.times()


class EngineSide:
    """An engine, driven step by step."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._ids = request_ids()

    def run(self, prompts: Sequence[list[int]], output_len: int) -> Times:
        """Greedy, exactly `output_len` tokens."""
        run = run_batch(self._engine, prompts, output_len, self._ids)
        return Times(run.first_s, (run.seconds - run.first_s) / max(1, output_len - 1))


class _Clock(LogitsProcessor):
    """Notes the time of each step; changes nothing."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def begin(self) -> None:
        self._marks = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._marks.append(time.perf_counter())
        return scores

    def times(self) -> Times:
        start, first, last = self._marks[0], self._marks[1], self._marks[-1]
        return Times(first - start, (last - first) / max(1, len(self._marks) - 2))


def compare(engine: EngineLike, *, num_pairs: int) -> dict[str, dict[str, Any]]:
    """Runs all comparisons and prints them; `ratio` above 1 means that the engine is faster."""
    sides = Sides(
        EngineSide(engine),
        TransformersSide(engine.info.model_dir, getattr(torch, engine.info.dtype)),
        random.Random(1),
        engine.info.vocab_size,
        num_pairs,
    )
    results = {f"decode batch {batch}, tok/s": sides.decode(batch) for batch in (1, 8)}
    results |= {f"prefill {length}, tok/s": sides.prefill(length) for length in (512, CACHED_PROMPT_LEN)}
    results[f"first tokens/s of a {CACHED_PROMPT_LEN}-token prompt, cached vs cold"] = sides.cached_vs_cold()
    rows = [(name, one["sgray"], one["other"], one["ratio"]) for name, one in results.items()]
    print(f"\n{num_pairs} pairs, {engine.info.dtype}, {torch.get_num_threads()} threads, medians")
    print(report.table(("measure", "sgray", "other", "ratio"), rows))
    return results


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides and the source of the prompts that they share."""

    ours: EngineSide
    theirs: TransformersSide
    rng: random.Random
    vocab_size: int
    num_pairs: int

    def decode(self, batch: int) -> dict[str, Any]:
        """Tokens a second of `batch` sequences that decode together."""

        def speed(side: EngineSide | TransformersSide, prompts: list[list[int]]) -> float:
            return batch / side.run(prompts, DECODE_STEPS).step_s

        return self._paired(speed, batch, DECODE_PROMPT_LEN)

    def prefill(self, length: int) -> dict[str, Any]:
        """Prompt tokens a second until the first answer token."""

        def speed(side: EngineSide | TransformersSide, prompts: list[list[int]]) -> float:
            return length / side.run(prompts, 1).first_s

        return self._paired(speed, 1, length)

    def cached_vs_cold(self) -> dict[str, Any]:
        """First tokens a second, ours alone: a prompt seen before against the same prompt when it was new."""
        pairs = []
        for _ in range(self.num_pairs + 1):
            prompts = self._prompts(1, CACHED_PROMPT_LEN)
            cold = self.ours.run(prompts, 1).first_s
            pairs.append((1 / self.ours.run(prompts, 1).first_s, 1 / cold))
        return _result(pairs[1:])

    def _paired(
        self, speed: Callable[[EngineSide | TransformersSide, list[list[int]]], float], batch: int, length: int
    ) -> dict[str, Any]:
        """One warm-up, then pairs in alternating order, each pair on new prompts."""
        pairs = []
        for index in range(self.num_pairs + 1):
            prompts = self._prompts(batch, length)
            if index % 2:
                other = speed(self.theirs, prompts)
                pairs.append((speed(self.ours, prompts), other))
            else:
                pairs.append((speed(self.ours, prompts), speed(self.theirs, prompts)))
        return _result(pairs[1:])

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        first = min(FIRST_ID, self.vocab_size // 2)
        return [[self.rng.randrange(first, self.vocab_size) for _ in range(length)] for _ in range(batch)]


def _result(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "sgray": statistics.median(pair[0] for pair in pairs),
        "other": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[0] / pair[1] for pair in pairs),
        "pairs": [list(pair) for pair in pairs],
    }
