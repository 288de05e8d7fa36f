"""The arithmetic around the kernels' figures; the measurements themselves are run in `tests/kernels`."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with the extra `dev` on Linux")

from sgray.bench import kernels
from sgray.bench.kernel_attention import attention_flops, kv_bytes
from sgray.bench.kernel_rig import Rig, full_sizes, largest_error, num_sets, ragged_lengths
from sgray.bench.stopwatch import MOST_CALLS, Stopwatch, num_passes
from sgray.errors import ConfigError, EngineError


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    kernels.add_flags(parser)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        kernels.run(parser.parse_args([]))


def test_unknown_sections_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown section 'x'.*decode, shared, extend"):
        kernels.choose("decode,x")
    assert kernels.choose("rows, linear") == ["rows", "linear"]


def test_ragged_lengths_have_the_mean_and_the_maximum_asked_for() -> None:
    lengths = ragged_lengths(64, 4096, 8.0)
    assert len(lengths) == 64
    assert max(lengths) == 8 * 4096
    assert sum(lengths) / 64 == pytest.approx(4096, rel=1e-3)
    assert sorted(lengths)[32] < 4096
    assert sorted(lengths)[-2] < max(lengths)
    assert list(lengths) != sorted(lengths)


def test_full_sizes_are_those_of_the_model() -> None:
    sizes = full_sizes()
    shapes = {weight.name: (weight.outputs, weight.inputs) for weight in sizes.weights}
    assert shapes == {
        "qkv": (6144, 4096),
        "output": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    }
    assert all(count * new == 2**14 for _, count, before, new in sizes.extend if not before)
    assert kv_bytes(sizes, 1) == 2 * 8 * 128 * 2


def test_flops_count_half_of_the_square_and_all_of_the_cached_part() -> None:
    sizes = full_sizes()
    assert attention_flops(sizes, 1, 0, 8192) == 4 * 32 * 128 * 8192**2 / 2
    assert attention_flops(sizes, 2, 100, 1) == pytest.approx(2 * 4 * 32 * 128 * 100.5)


def test_a_share_is_of_the_measured_ceiling() -> None:
    rig = Rig(torch.device("cpu"), full_sizes(), Stopwatch(torch.device("cpu")), read_gb_s=4000.0)
    assert rig.share(4e9, 2000.0) == pytest.approx(50.0)


def test_buffer_sets_exceed_the_cache_and_stay_few() -> None:
    assert num_sets(1e9) == 2
    assert num_sets(60e6) == 3
    assert num_sets(10) == 32


def test_a_graph_holds_enough_calls_to_be_timed_and_all_of_them_equally_often() -> None:
    assert num_passes(4, 10.0) * 4 == MOST_CALLS
    assert num_passes(2, 1000.0) == 4
    assert num_passes(32, 10_000.0) == 1


@pytest.mark.parametrize("wrong", [0.5, math.nan, math.inf])
def test_a_wrong_result_is_an_error_not_a_figure(wrong: float) -> None:
    expected = torch.ones(8)
    actual = expected.clone()
    assert largest_error(actual, expected) == 0
    actual[3] = wrong
    with pytest.raises(EngineError):
        largest_error(actual, expected)


def test_a_failure_is_reported_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    errors: dict[str, str] = {}
    found = kernels.collect({"first": lambda: 1, "second": lambda: 1 / 0, "third": lambda: 3}, errors)
    assert found == {"first": 1, "third": 3}
    assert errors == {"second": "ZeroDivisionError: division by zero"}
    assert "second failed: ZeroDivisionError" in capsys.readouterr().err


def test_what_was_not_measured_is_a_dash_in_the_table() -> None:
    assert kernels.rows_table([{"case": "a", "us": 1.5, "cuDNN us": None}]).split() == [
        "case", "us", "cuDNN", "us", "a", "1.5", "-"
    ]  # fmt: skip
