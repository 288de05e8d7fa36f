"""A tiny random model that has a real tokenizer, and engines that run it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from twins import make_twin

from sgray.config import Config, GrammarConfig
from sgray.engine.engine import Engine
from sgray.engine.executor import load_executor
from sgray.engine.grammar_queue import GrammarQueue
from sgray.engine.runner import ModelRunner
from sgray.protocol import Delta, Finish, Grammar, Request, SamplingParams

VOCAB_SIZE = 49152 + 40  # more than the tokenizer has


def make_model(directory: Path, tokenizer_dir: Path) -> Path:
    """A twin with the tokenizer of another directory; its end id is that tokenizer's."""
    make_twin(directory, vocab_size=VOCAB_SIZE, eos_token_id=2, max_position_embeddings=512, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_dir / name, directory / name)
    return directory


def config_of(model_dir: Path, **schedule: object) -> Config:
    return Config.parse(
        {
            "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cpu", "num_threads": 1},
            "memory": {"max_total_tokens": 2048},
            "schedule": {"random_seed": 1, "chunked_prefill_size": 64, **schedule},
        }
    )


def load_engine(config: Config, grammars: GrammarQueue, *, depth: int = 0) -> Engine:
    """An engine that shares what compiles grammars. With a depth of 1 it plans a step ahead, as for a GPU."""
    executor, info = load_executor(config)
    assert isinstance(executor, ModelRunner)
    executor.depth = depth
    return Engine(executor, info, config, grammars=grammars)


def make_queue(model_dir: Path, **limits: float) -> GrammarQueue:
    """What compiles grammars for the model that `make_model` made."""
    return GrammarQueue.of_tokenizer(lambda: model_dir, VOCAB_SIZE, (2,), GrammarConfig(**limits))


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    deltas: list[Delta] = field(default_factory=list)


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """What each request got, all of them run together."""
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            answer = answers[delta.id]
            assert answer.finish is None
            answer.tokens += delta.tokens
            answer.finish = delta.finish
            answer.deltas.append(delta)
    engine.check()
    return answers


def asking(name: str, prompt: list[int], grammar: Grammar | None, count: int = 40, **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": count, **sampling})  # type: ignore[arg-type]
    return Request(name, prompt, params, grammar=grammar)
