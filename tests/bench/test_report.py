from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgray.bench.report import percentile, summary, table, write_json


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (90, 90), (99, 99), (100, 100), (1, 1)])
def test_percentiles_of_one_to_a_hundred(percent: float, expected: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_percentiles_of_few_values_are_values_of_the_sample() -> None:
    assert [percentile([7.0], percent) for percent in (1, 50, 99)] == [7.0] * 3
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0], 51) == 2.0


def test_nothing_measured_is_zero() -> None:
    assert summary([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_summary_of_values() -> None:
    assert summary([1.0, 2.0, 3.0, 10.0]) == {"mean": 4.0, "p50": 2.0, "p90": 10.0, "p99": 10.0}


def test_columns_are_aligned() -> None:
    lines = table(("name", "n"), [("a", 1), ("long name", 12345.6), ("b", 0.01234)]).splitlines()
    assert lines == ["name            n", "a               1", "long name   12346", "b          0.0123"]


def test_json_is_written_only_where_asked(tmp_path: Path) -> None:
    write_json(None, {"a": 1})
    write_json(str(tmp_path / "out.json"), {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}
