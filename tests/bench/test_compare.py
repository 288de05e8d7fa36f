from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sgray.bench import compare
from sgray.bench.compare import EngineSide, Sides, Times, TransformersSide
from sgray.config import Config
from sgray.engine.engine import Engine


@pytest.fixture(scope="module")
def sides(model_dir: Path) -> Sides:
    model = {"model_path": str(model_dir), "device": "cpu", "dtype": "float32"}
    engine = Engine.load(Config.parse({"model": model, "memory": {"max_total_tokens": 4096}}))
    theirs = TransformersSide(str(model_dir), torch.float32)
    return Sides(EngineSide(engine), theirs, random.Random(0), engine.info.vocab_size, num_pairs=2)


def test_both_sides_time_the_first_token_and_the_steps(sides: Sides) -> None:
    for side in (sides.ours, sides.theirs):
        times = side.run([[1000, 2000, 3000]], 4)
        assert times.first_s > 0
        assert times.step_s > 0


def test_a_comparison_is_the_median_of_its_pairs(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "DECODE_STEPS", 3)
    result = sides.decode(2)
    assert len(result["pairs"]) == 2
    ratios = sorted(ours / theirs for ours, theirs in result["pairs"])
    assert result["ratio"] == pytest.approx(sum(ratios) / 2)


def test_a_prompt_seen_before_is_faster_to_its_first_token(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "CACHED_PROMPT_LEN", 600)
    assert sides.cached_vs_cold()["ratio"] > 2


def test_each_pair_runs_on_one_set_of_new_prompts_and_the_order_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, prompts: list[list[int]], output_len: int) -> Times:
            calls.append((self.name, prompts[0][0]))
            return Times(0.5 if self.name == "ours" else 1.0, 1.0)

    result = Sides(Side("ours"), Side("theirs"), random.Random(0), 50_000, num_pairs=3).prefill(8)  # type: ignore[arg-type]
    assert result["ratio"] == 2.0
    names, prompts = zip(*calls, strict=True)
    assert names == ("ours", "theirs", "theirs", "ours", "ours", "theirs", "theirs", "ours")
    assert [prompts[index] == prompts[index + 1] for index in (0, 2, 4, 6)] == [True] * 4
    assert len(set(prompts)) == 4
