"""The summary of what a device did."""

import pytest

from sgray.bench.step_limits import REST, DecodeStep, group_of, limits_us
from sgray.bench.steps import Work, grouped, short_name, summarise


def test_time_is_idle_where_nothing_runs_and_overlap_is_counted_once() -> None:
    work = [Work("a", 0, 4), Work("b", 3, 6), Work("a", 8, 10)]
    found = summarise(work, num_steps=2)
    assert found["step_us"] == 5
    assert found["idle"] == pytest.approx(0.2)
    assert found["kernels"]["a"] == {"us": 3.0, "count": 1.0, "share": pytest.approx(0.6)}
    assert list(found["kernels"]) == ["a", "b"]


def test_a_kernels_name_is_short() -> None:
    assert short_name("void at::native::copy<int, float>(int*)") == "at::native::copy"


LLAMA = DecodeStep(1, 1000, 4096, 14336, 32, 32, 8, 128, 128256)


def test_few_rows_read_every_weight_and_many_multiply() -> None:
    weights = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096) + 128256 * 4096
    few = limits_us(LLAMA, read_gb_s=4000, matmul_tflop_s=600)
    assert few["products"] == pytest.approx(2 * weights / 4e6)
    assert few["attention"] == pytest.approx(1000 * 131072 / 4e6)
    many = limits_us(DecodeStep(1024, *[getattr(LLAMA, name) for name in LLAMA.__slots__[1:]]), 4000, 600)
    assert many["products"] == pytest.approx(2 * 1024 * weights / 600e6)


def test_every_kernel_is_in_a_group() -> None:
    names = {"_row": "products", "nvjet_tst_64x8": "products", "_attend": "attention", "_rope_store": REST}
    names |= {"_rope_store": "norm, gate, rotation", "_survey": "sampling", "Memcpy HtoD": REST}
    assert {name: group_of(name) for name in names} == names
    found = grouped({name: {"us": 1.0} for name in names}, limits_us(LLAMA, 4000, 600))
    assert {name: one["us"] for name, one in found.items()} == {
        "products": 2,
        "attention": 1,
        "norm, gate, rotation": 1,
        "sampling": 1,
        REST: 1,
    }
