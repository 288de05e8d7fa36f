"""The summary of what a device did."""

import pytest

from sgray.bench.steps import Work, short_name, summarise


def test_time_is_idle_where_nothing_runs_and_overlap_is_counted_once() -> None:
    work = [Work("a", 0, 4), Work("b", 3, 6), Work("a", 8, 10)]
    found = summarise(work, num_steps=2)
    assert found["step_us"] == 5
    assert found["idle"] == pytest.approx(0.2)
    assert found["kernels"]["a"] == {"us": 3.0, "count": 1.0, "share": pytest.approx(0.6)}
    assert list(found["kernels"]) == ["a", "b"]


def test_a_kernels_name_is_short() -> None:
    assert short_name("void at::native::copy<int, float>(int*)") == "at::native::copy"
