from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from sgray.bench.drive import request_ids, run_batch
from sgray.bench.offline import add_flags, run_workloads, throughput_config
from sgray.bench.workloads import Workload
from sgray.cli import main
from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.errors import ConfigError, SgrayError


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    config = {"model": {"model_path": str(model_dir), "device": "cpu"}, "memory": {"max_total_tokens": 4096}}
    return Engine.load(Config.parse(config))


def test_a_batch_gives_exactly_the_asked_tokens_and_times_in_order(engine: Engine) -> None:
    run = run_batch(engine, [[1000 + index] * 8 for index in range(3)], 5, request_ids())
    assert sorted(run.num_tokens.values()) == [5, 5, 5]
    assert run.output_tokens == 15
    assert 0 < run.first_s < run.seconds


def test_shared_prefixes_show_as_cached(engine: Engine) -> None:
    workload = Workload(num_groups=1, group_size=4, prefix_len=64, unique_len=4, output_len=1)
    figures = run_workloads(engine, {"shared": workload}, seed=11)["shared"]
    assert (figures["reqs"], figures["in_tok"], figures["out_tok"]) == (4, 4 * 68, 4)
    assert figures["cached_tok"] == 3 * 64
    assert figures["total_tok_s"] == pytest.approx((4 * 68 + 4) / figures["s"])


def test_repeats_are_all_reported_and_the_best_counts(engine: Engine) -> None:
    workload = Workload(num_groups=2, group_size=1, prefix_len=0, unique_len=8, output_len=2)
    figures = run_workloads(engine, {"small": workload}, seed=1, repeat=3)["small"]
    assert len(figures["all_s"]) == 3
    assert figures["s"] == min(figures["all_s"])


def test_a_workload_beyond_the_context_is_refused_by_name(engine: Engine) -> None:
    workload = Workload(num_groups=1, group_size=1, prefix_len=0, unique_len=10**6, output_len=1)
    with pytest.raises(ConfigError, match="huge needs 1000001 tokens"):
        run_workloads(engine, {"huge": workload}, seed=0)


def test_a_refused_request_is_an_error_not_a_figure(engine: Engine) -> None:
    with pytest.raises(SgrayError):
        run_batch(engine, [[10**9]], 1, request_ids())


def test_the_command_writes_the_named_workloads(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["bs1_isl1024_osl257", "shared_32x32_p4096_u128_osl128"]
    path = tmp_path / "out.json"
    argv = ["bench", "offline", "--scale", "cpu", "--only", ",".join(names), "--repeat", "1", "--no-compare"]
    assert main([*argv, "--json", str(path), "--max-total-tokens", "8192"]) == 0
    document = json.loads(path.read_text())
    assert list(document["workloads"]) == names
    assert document["workloads"]["shared_32x32_p4096_u128_osl128"]["cached_tok"] == 2 * 256
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_an_unknown_workload_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--only", "nope", "--model-path", "./no/such/model"]) == 1
    assert "unknown workload 'nope'" in capsys.readouterr().err


def test_shapes_alone_are_enough_with_dummy_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["bench", "offline", "--scale", "cpu", "--model", str(tmp_path), "--load-format", "dummy", "--no-compare"]
    assert main([*argv, "--only", "bs16_isl1024_osl257", "--repeat", "1", "--max-total-tokens", "1024"]) == 0
    assert "bs16_isl1024_osl257" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        (["--chunked-prefill-size", "96"], 96),
        (["--chunked-prefill-size", "96", "--mixed-prefill-size", "32"], 32),
    ],
)
def test_steps_that_decode_prefill_as_much_as_others_unless_a_flag_says_less(flags: list[str], size: int) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert throughput_config(parser.parse_args(["--scale", "cpu", *flags])).schedule.mixed_prefill_size == size
