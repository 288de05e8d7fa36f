"""The batch API of the deployed service, as a user of the example sees it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from waiting import until

from sgray.errors import ConfigError
from sgray.serve.build import build

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


@contextmanager
def another_node() -> Iterator[None]:
    """The cluster has a second node meanwhile, which has no cores to run anything on."""
    ray_command = str(Path(sys.executable).parent / "ray")
    address = ray.get_runtime_context().gcs_address
    command = [ray_command, "start", "--block", f"--address={address}", "--num-cpus=0", "--disable-usage-stats"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        try:
            until(lambda: num_nodes() == 2, "the second node has joined", 60)
            yield
        finally:
            node.terminate()
    until(lambda: num_nodes() == 1, "the second node is gone", 60)


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def test_several_ingresses_on_several_nodes_cannot_share_a_directory(
    deploy: Callable[[Mapping[str, Any]], Any], tmp_path: Path
) -> None:
    deploy({})
    batches = {"batches_dir": str(tmp_path)}
    build({"batches": batches, "serve": {"num_ingress_replicas": 2}})
    with another_node():
        with pytest.raises(ConfigError, match=r"2 nodes.*num_ingress_replicas"):
            build({"batches": batches, "serve": {"num_ingress_replicas": 2}})
        build({"batches": batches, "serve": {"num_ingress_replicas": 1}})
        build({"serve": {"num_ingress_replicas": 2}})
