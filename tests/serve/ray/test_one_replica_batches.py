"""The batch API of the deployed service, as a user of the example sees it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples/batch_labelling.py"


def test_the_example_labels_its_reviews_and_leaves_the_service_idle(
    deploy: Callable[[Mapping[str, Any]], Any],
) -> None:
    service = deploy({})
    spec = importlib.util.spec_from_file_location("batch_labelling", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    labels = example.main(f"{service.url}/v1", poll_s=0.1)
    assert list(labels) == example.REVIEWS
    assert set(labels.values()) <= set(example.LABELS)
    service.assert_idle()
