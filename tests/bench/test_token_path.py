"""What stands for the model where the way of a token is measured: an executor that answers plans in time."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sgray.config import Config
from sgray.protocol import Finish, Request, SamplingParams

SOURCE = Path(__file__).parents[2] / "benchmarks" / "token_path.py"
STEP_S = 0.01


@pytest.fixture(scope="module")
def token_path() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("token_path", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["token_path"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["token_path"]


def test_the_products_engine_runs_on_a_replay_at_its_pace(token_path: ModuleType, model_dir: Path) -> None:
    values = {"model": {"model_path": str(model_dir)}, "schedule": {"max_running_requests": 4}}
    engine = token_path.replay_engine(Config.parse(values), STEP_S)
    for number in range(4):
        prompt = [100 + number] * 30
        engine.add(Request(f"{number}", prompt, SamplingParams(max_new_tokens=20, ignore_eos=True)))
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(4)}
    begin, num_ended = time.monotonic(), 0
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens[delta.id] += delta.tokens
            assert delta.finish in (None, Finish("length"))
            num_ended += delta.finish is not None
    assert num_ended == 4 and all(len(own) == 20 for own in tokens.values())
    assert all(100 <= token < 49_000 for own in tokens.values() for token in own)
    assert len({tuple(own) for own in tokens.values()}) == 4
    assert time.monotonic() - begin >= 20 * STEP_S
    engine.check()


def test_costs_and_gaps_are_those_of_the_window(token_path: ModuleType) -> None:
    streams = [[(0.5, 1), (1.0, 1), (1.25, 2), (1.5, 1), (9.0, 1)], [(1.2, 1), (1.4, 1)]]
    found = token_path.figures(streams, 1.0, 2.0, {"ingress": 0.3, "other": 0.0})
    assert found["tokens_per_s"] == 6
    assert found["us_per_token"] == pytest.approx(50_000)
    assert found["us_per_token_by_process"] == {"ingress": pytest.approx(50_000)}
    assert found["itl_ms_p50"] == pytest.approx(250) and found["itl_ms_p99"] == pytest.approx(250)
    with pytest.raises(RuntimeError, match="no tokens"):
        token_path.figures([[]], 1.0, 2.0, {})


def test_the_use_of_processors_is_that_of_a_process_and_its_children(token_path: ModuleType) -> None:
    before = token_path.usage(os.getpid())
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    used = token_path.usage(os.getpid()).since(before)
    assert 0.05 < sum(used.values()) < 5
