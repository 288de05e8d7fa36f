"""A model over several processes: the tokens of one, and one end for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grammars import Answer, asking, run
from steps import Driver, Running
from tokenizers import Tokenizer
from twins import EXPERTS, make_twin, some_tokens
from waiting import until

from sgray.config import Config
from sgray.engine import ranks
from sgray.engine.engine import Engine
from sgray.engine.executor import load_executor
from sgray.engine.gang import Gang
from sgray.engine.grammar_queue import GrammarQueue
from sgray.engine.loop import EngineLoop
from sgray.engine.ranks import BEAT_S, SILENCE_S, Ranks
from sgray.errors import DeviceLostError, ModelLoadError
from sgray.protocol import Grammar

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


def config_of(model_dir: Path, size: int, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cpu"},
        "memory": {"max_total_tokens": 2048},
        "schedule": {"random_seed": 1, "chunked_prefill_size": 64},
        "parallel": {"tp_size": size},
    }
    return Config.parse({**values, **sections})


def load(model_dir: Path, size: int, grammars: GrammarQueue | None = None) -> tuple[Engine, Any]:
    config = config_of(model_dir, size)
    executor, info = load_executor(config)
    return Engine(executor, info, config, grammars=grammars), executor


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("twin"), num_hidden_layers=1)


@pytest.fixture
def gang(twin: Path) -> Iterator[tuple[Engine, Gang]]:
    """An engine of two ranks, both on one thread."""
    engine, executor = load(twin, 2)
    with closing(engine):
        yield engine, executor


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_an_engine_of_two_ranks_answers_as_one_with_cache_grammar_seeds_and_logprobs(
    grammar_model: Path, grammars: GrammarQueue
) -> None:
    prompt = some_tokens(70, vocab_size=400)

    def answers(size: int) -> list[dict[str, Answer]]:
        engine, _ = load(grammar_model, size, grammars)
        with closing(engine):
            first = [
                asking("greedy", prompt, None, 12, logprobs=2),
                asking("seeded", [*prompt[:50], 5], None, 12, temperature=1.0, seed=3, repetition_penalty=1.2),
                asking("formed", prompt[:20], Grammar("json_schema", SCHEMA), temperature=1.0, seed=4),
                asking("scored", prompt[:30], None, 3, prompt_logprobs=1),
            ]
            return [run(engine, first), run(engine, [asking("again", prompt, None, 12)])]

    alone, shared = answers(1), answers(2)
    for one, other in zip(alone, shared, strict=True):
        assert {name: answer.tokens for name, answer in one.items()} == {
            name: answer.tokens for name, answer in other.items()
        }
    assert shared[0]["formed"].finish == alone[0]["formed"].finish
    assert shared[1]["again"].tokens == shared[0]["greedy"].tokens
    assert shared[1]["again"].deltas[0].cached_tokens == alone[1]["again"].deltas[0].cached_tokens > 0
    for name in ("greedy", "scored"):
        for mine, other in zip(shared[0][name].deltas, alone[0][name].deltas, strict=True):
            for entry, twin_entry in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert entry.logprob == pytest.approx(twin_entry.logprob, abs=1e-3)
                assert [token for token, _ in entry.top] == [token for token, _ in twin_entry.top]


def test_the_default_model_on_three_ranks_gives_the_tokens_of_one_pub_125(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in ("The capital of France is", "def fibonacci(n):", "Dear Sir or")]

    def generate(size: int) -> list[list[int]]:
        driver = Driver(*load_executor(config_of(model_dir, size)))
        with closing(driver.executor):
            running: list[Running] = [driver.start(prompt) for prompt in prompts]
            return driver.generate(running, 6)

    assert generate(3) == generate(1)


@pytest.mark.parametrize("family", EXPERTS)
def test_two_ranks_share_experts_whole_or_in_parts_and_answer_as_one(tmp_path: Path, family: str) -> None:
    model_dir = make_twin(tmp_path, family, num_hidden_layers=2)

    def generate(**parallel: int) -> list[list[int]]:
        driver = Driver(*load_executor(config_of(model_dir, 1, parallel=parallel)))
        with closing(driver.executor):
            running: list[Running] = [driver.start(some_tokens(9 + 20 * number, number)) for number in range(3)]
            return driver.generate(running, 8, 16)

    alone = generate(tp_size=1)
    assert generate(tp_size=2) == alone
    assert generate(tp_size=2, ep_size=2) == alone


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
def test_a_killed_rank_ends_the_gang(gang: tuple[Engine, Gang], is_busy: bool) -> None:
    engine, executor = gang
    [process] = executor.processes
    run(engine, [asking("before", [5] * 9, None, 3)])
    if is_busy:
        engine.add(asking("cut", [6] * 9, None, 200))
        for _ in range(3):
            engine.step()
    os.kill(process, signal.SIGKILL)
    if not is_busy:
        until(lambda: engine.fault)
        engine.add(asking("cut", [6] * 9, None, 200))
    deltas = [delta for _ in range(300) if engine.has_work for delta in engine.step().deltas]
    [finish] = [delta.finish for delta in deltas if delta.finish is not None]
    assert finish.error is not None and finish.error.code == "device_lost"
    until(lambda: engine.fault)
    assert "rank 1 was killed by signal 9" in str(engine.fault)
    assert not is_running(process)


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
def test_a_rank_that_is_stuck_ends_the_gang(
    gang: tuple[Engine, Gang], is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SILENCE_S + 2 * BEAT_S <= 10
    monkeypatch.setattr(ranks, "SILENCE_S", 2.0)
    engine, executor = gang
    [process] = executor.processes
    os.kill(process, signal.SIGSTOP)
    if is_busy:
        engine.add(asking("cut", [6] * 9, None, 200))
        [delta] = engine.step().deltas
        assert delta.finish is not None and delta.finish.error is not None
    until(lambda: engine.fault)
    assert "rank 1 has said nothing" in str(engine.fault)
    until(lambda: not is_running(process))


def test_a_loop_whose_gang_is_lost_says_so_while_it_is_idle_and_stops_clean(twin: Path) -> None:
    engine, executor = load(twin, 2)
    loop = EngineLoop(engine, lambda report: None)
    loop.start()
    assert not loop.health().is_lost
    os.kill(executor.processes[0], signal.SIGKILL)
    until(lambda: loop.health().is_lost)
    assert "rank 1" in str(loop.health().error)
    loop.stop()
    assert not any(map(is_running, executor.processes))


def test_an_error_in_rank_0_is_the_end_of_all(gang: tuple[Engine, Gang], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    engine, executor = gang
    monkeypatch.setattr(executor._rank, "submit", fail)
    [finish] = [delta.finish for delta in run(engine, [asking("a", [5] * 9, None, 3)])["a"].deltas]
    assert finish is not None and finish.error is not None
    assert engine.fault == "DeviceLostError: rank 0: MemoryError: no room"
    until(lambda: not is_running(executor.processes[0]))


def test_closing_leaves_neither_process_nor_file(twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        engine, executor = load(twin, 2)
        assert not list(tmp_path.iterdir())
        engine.close()
        engine.close()
        assert not any(map(is_running, executor.processes))
    del engine, executor
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files + 2


def test_a_rank_that_cannot_begin_says_why() -> None:
    others = Ranks([b"no message"])
    try:
        with pytest.raises(DeviceLostError, match=r"rank 1: \w*Error"):
            others.meet()
    finally:
        others.close()


def test_weights_that_are_missing_are_said_as_without_ranks(tmp_path: Path) -> None:
    make_twin(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="holds neither"):
        load(tmp_path / "model", 2)


ORPHANS = """
import sys, time
sys.path.insert(0, {root!r})
from sgray.config import Config
from sgray.engine.executor import load_executor
executor, _ = load_executor(Config.parse({values!r}))
print(*executor.processes, flush=True)
time.sleep(60)  # until the test kills it
"""


def test_ranks_end_with_the_process_that_started_them(twin: Path) -> None:
    root = Path(__file__).parents[2]
    script = ORPHANS.format(root=str(root), values=config_of(twin, 2).model_dump())
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert processes and all(map(is_running, processes))
        parent.kill()
    until(lambda: not any(map(is_running, processes)), 5.0)
