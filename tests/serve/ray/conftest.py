"""One local Ray cluster for the session, and the service on it in whatever shape a module asks for."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from sgray.config import DEFAULT_MODEL
from sgray.launch_server import free_ports
from sgray.serve.build import APP_NAME, build

ROOT = Path(__file__).parents[3]
QUICK = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray leaves sockets and files to the garbage collector and uses what Python deprecates; only its warnings pass."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for kind in (
                "ResourceWarning",
                "DeprecationWarning",
                "FutureWarning",
                "pytest.PytestUnraisableExceptionWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@dataclass(frozen=True)
class Service:
    """A running service, seen from outside."""

    url: str

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=60.0, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic's official client."""
        return anthropic.Anthropic(base_url=self.url, api_key="none", timeout=60.0, **options)

    def body(self, text: str, **more: Any) -> dict[str, Any]:
        """A greedy chat call."""
        messages = [{"role": "user", "content": text}]
        return {"model": DEFAULT_MODEL, "messages": messages, "temperature": 0, "max_tokens": 16} | more

    def figures(self) -> dict[str, dict[str, float]]:
        """The engine's figures by name and replica."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return {
            family.name: {sample.labels["replica"]: sample.value for sample in family.samples}
            for family in text_string_to_metric_families(text)
            if family.samples and "replica" in family.samples[0].labels
        }

    def assert_idle(self) -> None:
        """Soon nothing runs or waits, and then no page of any replica is leased."""
        figures: dict[str, dict[str, float]] = {}

        def is_idle() -> bool:
            figures.update(self.figures())
            names = ("sgray:num_running_reqs", "sgray:num_queue_reqs")
            return not any(value for name in names for value in figures[name].values())

        until(is_idle, "nothing runs or waits", 15)
        for replica, total in figures["sgray:max_total_num_tokens"].items():
            free, cached = figures["sgray:kv_available_tokens"][replica], figures["sgray:kv_evictable_tokens"][replica]
            assert free + cached == total, f"leased pages are left on {replica}"

    def until(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Wait for a condition; an HTTP error counts as false."""
        until(condition, what, timeout_s)


def until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait for a condition; an HTTP error counts as false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"not true after {timeout_s:g} s: {what}")


@pytest.fixture(scope="session")
def service_type() -> type[Service]:
    """For modules that start the service themselves."""
    return Service


@pytest.fixture(scope="session")
def cluster(model_dir: Path) -> Iterator[str]:
    """A Ray cluster of this machine with Serve's Python proxy, whose URL it gives."""
    port = free_ports(1)[0]
    before = {name: os.environ.get(name) for name in QUICK}
    os.environ.update(QUICK)
    # Short: the socket paths inside it may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="sgray-ray-", ignore_cleanup_errors=True) as scratch:
        ray.init(
            "local",
            num_cpus=4,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=scratch,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def batches_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the service keeps its batches."""
    return str(tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="session")
def deploy(cluster: str, batches_dir: str) -> Iterator[Callable[..., Service]]:
    """Deploy the service with these `serve` and `schedule` values and sections; it stays until others are asked for.

    With `in_place` it takes over from the one that runs.
    """
    running: list[Any] = []

    def deployed(
        values: Mapping[str, Any],
        schedule: Mapping[str, Any] | None = None,
        *,
        in_place: bool = False,
        **sections: Mapping[str, Any],
    ) -> Service:
        wanted_now = (dict(values), dict(schedule or {}), sections)
        if running == [wanted_now]:
            return Service(cluster)
        if running:
            running.clear()
            if not in_place:
                serve.delete(APP_NAME)
        args = {
            # In bfloat16 a greedy choice between two near-equal logits may depend on what was cached.
            **sections,
            "model": {"dtype": "float32", **sections.get("model", {})},
            "memory": {"max_total_tokens": 16_384},
            "schedule": dict(schedule or {}),
            "batches": {"batches_dir": batches_dir},
            "serve": {
                "num_cpus_per_replica": 0.5,
                "num_cpus_per_ingress": 0.1,
                "health_check_period_s": 1.0,
                "graceful_shutdown_timeout_s": 120.0,
                **values,
            },
        }
        serve.run(build(args), name=APP_NAME, route_prefix="/")
        service = Service(cluster)
        wanted = values.get("min_replicas", 1)
        if wanted:
            until(lambda: len(service.figures()["sgray:num_running_reqs"]) == wanted, "all replicas are linked", 30)
        running.append(wanted_now)
        return service

    yield deployed
    if running:
        serve.delete(APP_NAME)
