"""Drives an executor with plans, as a scheduler without a cache would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sgray.config import Config
from sgray.engine.executor import load_executor
from sgray.engine.plan import Admission, Executor, StepPlan, StepResult
from sgray.protocol import EngineInfo, SamplingParams, TokenLogprobs

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Running:
    """One sequence and what came out of it."""

    slot: int
    sampling: SamplingParams
    num_prompt: int
    tokens: list[int]
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    is_admitted: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """Hands out slots and pages and never takes any back, unless told to."""

    def __init__(self, executor: Executor, info: EngineInfo) -> None:
        self.executor = executor
        self.info = info
        self.next_page = 0
        self.next_slot = 0
        self.step_number = 0

    @classmethod
    def load(cls, model_dir: Path, dtype: str = "float32", **sections: dict[str, Any]) -> Driver:
        values: dict[str, Any] = {"model": {"model_path": str(model_dir), "dtype": dtype, "device": "cpu"}}
        values["memory"] = {"max_total_tokens": 16384}
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return cls(*load_executor(Config.parse(values)))

    def start(self, tokens: list[int], sampling: SamplingParams = GREEDY, **changes: Any) -> Running:
        self.next_slot += 1
        return Running(self.next_slot - 1, sampling, len(tokens), list(tokens), **changes)

    def step(self, work: list[tuple[Running, int]], **changes: Any) -> StepResult:
        """One step that computes so many tokens of each sequence."""
        admissions: list[Admission] = []
        new_pages: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        for sequence, count in work:
            if not sequence.is_admitted:
                admissions.append(self._admission(sequence))
            new_pages += self._grow(sequence, sequence.num_computed + count)
            tokens += sequence.tokens[sequence.num_computed : sequence.num_computed + count]
        plan = StepPlan(
            step=self.step_number,
            admissions=admissions,
            slots=[sequence.slot for sequence, _ in work],
            starts=[sequence.num_computed for sequence, _ in work],
            lengths=[count for _, count in work],
            samples=[sequence.num_computed + count == len(sequence.tokens) for sequence, count in work],
            new_pages=new_pages,
            tokens=tokens,
        )
        self.step_number += 1
        self.executor.submit(replace(plan, **changes))
        result = self.executor.collect()
        self._take(work, result)
        return result

    def generate(self, sequences: list[Running], count: int, chunk: int = 1 << 20) -> list[list[int]]:
        """Runs the sequences together until each has `count` tokens, prompts in chunks."""
        while True:
            work = [
                (one, min(chunk, len(one.tokens) - one.num_computed)) for one in sequences if len(one.output) < count
            ]
            work = [(one, length) for one, length in work if one.error is None]
            if not work:
                return [one.output for one in sequences]
            self.step(work)

    def logprobs_everywhere(self, tokens: list[int], chunk: int = 1 << 20) -> torch.Tensor:
        """Our log-probabilities after every token, (tokens, vocabulary)."""
        size = self.info.vocab_size
        asking = SamplingParams(temperature=0.0, logprobs=size, prompt_logprobs=size)
        sequence = self.start(tokens, asking)
        self.generate([sequence], 1, chunk)
        table = torch.full((len(tokens), size), float("nan"))
        for row, entry in enumerate([*sequence.prompt_logprobs, *sequence.logprobs]):
            for token, logprob in entry.top:
                table[row, token] = logprob
        return table

    def _admission(self, sequence: Running) -> Admission:
        sequence.is_admitted = True
        told = (sequence.sampling, sequence.seed, sequence.num_prompt, list(sequence.tokens), sequence.end_ids)
        return Admission(sequence.slot, *told)

    def _grow(self, sequence: Running, length: int) -> list[tuple[int, int, int]]:
        first, end = len(sequence.pages), -(-length // self.info.page_size)
        for _ in range(first, end):
            sequence.pages.append(self.next_page)
            self.next_page += 1
        return [(sequence.slot, place, sequence.pages[place]) for place in range(first, end)]

    def _take(self, work: list[tuple[Running, int]], result: StepResult) -> None:
        for index, (sequence, count) in enumerate(work):
            sequence.num_computed += count
            sequence.error = result.errors.get(index)
            sequence.prompt_logprobs += result.prompt_logprobs[index] or []
            if result.tokens[index] >= 0:
                sequence.tokens.append(result.tokens[index])
            if (logprobs := result.logprobs[index]) is not None:
                sequence.logprobs.append(logprobs)
