"""The example that maps a dataset: every row gets its label, and the service never more than it was promised."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray.data

EXAMPLE = Path(__file__).parents[3] / "examples/map_a_dataset.py"
IN_FLIGHT = 3


def test_a_dataset_is_mapped_through_the_handle_with_a_bound_on_what_is_in_flight(
    deploy: Callable[[Mapping[str, Any]], Any],
) -> None:
    service = deploy({})
    spec = importlib.util.spec_from_file_location("map_a_dataset", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ray.data.DataContext.get_current().enable_progress_bars = False
    most, is_done = [0.0], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            figures = service.figures()
            most[0] = max(
                most[0], *figures["sgray:num_running_reqs"].values(), *figures["sgray:num_queue_reqs"].values()
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        rows = example.main(num_actors=1, in_flight=IN_FLIGHT)
    finally:
        is_done.set()
        watcher.join()
    assert sorted(row["text"] for row in rows) == sorted(example.REVIEWS * 8)
    assert {row["label"] for row in rows} <= {"good", "bad"}
    assert 0 < most[0] <= IN_FLIGHT
    service.assert_idle()
