"""The example that maps a dataset: every row gets its label, and the service never more than it was promised."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray.data

from sgray.config import DEFAULT_MODEL

EXAMPLE = Path(__file__).parents[3] / "examples/map_a_dataset.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("map_a_dataset", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dataset_is_mapped_through_the_handle_and_each_row_is_one_call(
    deploy: Callable[[Mapping[str, Any]], Any], example: ModuleType
) -> None:
    service = deploy({})
    ray.data.DataContext.get_current().enable_progress_bars = False
    before = sum(service.figures()["sgray:engine_requests"].values())
    rows = example.main(num_actors=1)
    assert sorted(row["text"] for row in rows) == sorted(example.REVIEWS * 8)
    assert {row["label"] for row in rows} <= {"good", "bad"}
    service.assert_idle()
    assert sum(service.figures()["sgray:engine_requests"].values()) - before == len(rows)


def test_an_actor_has_no_more_calls_in_flight_than_it_may(
    deploy: Callable[[Mapping[str, Any]], Any], example: ModuleType
) -> None:
    deploy({})
    running, most = 0, 0

    class Counted:
        """The service's handle, with a count of the calls that are not answered."""

        def __init__(self, handle: Any) -> None:
            self.completions = self
            self.handle = handle

        async def remote(self, body: dict[str, Any]) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await self.handle.completions.remote(body)
            finally:
                running -= 1

    async def labelled() -> dict[str, list[str]]:
        labeller = example.Labeller(DEFAULT_MODEL, in_flight=3)
        labeller.service = Counted(labeller.service)
        return await labeller({"text": example.REVIEWS * 3})

    found = asyncio.run(labelled())
    assert found["text"] == example.REVIEWS * 3 and len(found["label"]) == 12
    assert (most, running) == (3, 0)
