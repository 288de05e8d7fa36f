from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sgray.bench import peers
from sgray.bench.offline import beside_peers, token_ms
from sgray.bench.workloads import offline_workloads
from sgray.protocol import EngineInfo

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"
INFO = EngineInfo(
    model_name="x",
    model_dir=str(SHAPES / "llama-3.1-8b"),
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    device="cuda",
    vocab_size=128256,
    context_length=131072,
    end_ids=(128009,),
    page_size=64,
    num_pages=1,
    max_running_requests=256,
)
FIGURES = {name: {"s": pair.best / 2, "out_tok_s": 1.0} for name, pair in peers.OFFLINE_S.items()}


def test_every_workload_has_figures_of_both_engines() -> None:
    assert set(peers.OFFLINE_S) == set(offline_workloads())
    assert all(set(sides) == set(peers.ENGINES) for sides in peers.HTTP.values())


def test_the_shapes_in_the_repository_are_the_peers_shapes() -> None:
    assert peers.is_comparable(INFO)


@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"dtype": "float16"}, {"model_dir": str(SHAPES / "llama-3.1-8b-vocab-49152")}],
)
def test_another_device_type_or_shape_is_not_compared(changes: dict[str, str]) -> None:
    assert not peers.is_comparable(replace(INFO, **changes))


def test_a_head_size_that_is_left_out_is_the_usual_one(tmp_path: Path) -> None:
    fields = json.loads((SHAPES / "llama-3.1-8b" / "config.json").read_text())
    del fields["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert peers.is_comparable(replace(INFO, model_dir=str(tmp_path)))


def test_peers_stand_beside_and_the_ratio_is_to_the_better_one() -> None:
    text = beside_peers(FIGURES, has_peers=True)
    row = next(line.split() for line in text.splitlines() if line.startswith("thr_1000"))
    assert row[3:] == ["44.9", "42.1", "2"]
    assert all(version in text for version in peers.ENGINES.values())


def test_time_per_token_is_the_difference_of_two_workloads() -> None:
    assert token_ms({"bs1_isl1024_osl1": 0.1, "bs1_isl1024_osl257": 1.124}) == pytest.approx(4.0)
    assert token_ms({"bs1_isl1024_osl257": 1.124}) is None
    assert "sglang 4.85 ms, vllm 4.99 ms" in beside_peers(FIGURES, has_peers=True)


def test_without_comparable_shapes_nothing_of_the_peers_is_printed() -> None:
    text = beside_peers(FIGURES, has_peers=False)
    assert "sglang" not in text
    assert text.startswith("time per token, one sequence: sgray")
