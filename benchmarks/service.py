"""The service on a Ray cluster of its own, on this machine, for benchmarks that deploy it again and again.

Knows nothing of what is asked of it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sgray.launch_server import free_ports, ray_defaults, replica_ports

if TYPE_CHECKING:
    from ray.serve import Application

ROOT = Path(__file__).parents[1]
Build = Callable[[Mapping[str, Any]], "Application"]
Deploy = Callable[[Mapping[str, Any], Build | None], None]


@contextlib.contextmanager
def cluster(*, haproxy: bool, temp_dir: Path | None = None) -> Iterator[tuple[str, Deploy]]:
    """An empty cluster: its URL, and what deploys a configuration in the place of the last one.

    The second argument of that builds another application than the product's from a configuration. The processes of
    the cluster put their temporary files into `temp_dir`, or where this process does.
    """
    port = free_ports(1)[0]
    with (
        tempfile.TemporaryDirectory(prefix="sgray-be-", ignore_cleanup_errors=True) as scratch,
        replica_ports() if haproxy else contextlib.nullcontext() as ports,
    ):
        os.environ.update(ray_defaults(Path(scratch), ports))
        paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        os.environ.update(PYTHONPATH=paths, RAY_AUTH_MODE="disabled", RAY_SERVE_LOG_TO_STDERR="0")
        os.environ.update(RAY_worker_niceness="0")  # whatever else runs here should not look like a wedge
        if temp_dir is not None:
            os.environ.update(TMPDIR=str(temp_dir))  # this process has looked already
        import ray  # it reads the environment when it is imported
        from ray import serve

        from sgray.serve.build import APP_NAME, build

        def deploy(args: Mapping[str, Any], other: Build | None) -> None:
            values = {"batches": {"batches_dir": str(Path(scratch, "batches"))}, **args}
            serve.run((other or build)(values), name=APP_NAME, route_prefix="/")

        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=scratch)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}", deploy
        finally:
            with contextlib.suppress(Exception):  # Serve's own end is not what is tried here
                serve.shutdown()
            ray.shutdown()


def leaked_pages(url: str) -> int:
    """Tokens of memory that nobody has although nothing runs; raises TimeoutError if something always does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            told = figures(url)
            names = ("sgray:num_running_reqs", "sgray:num_queue_reqs")
            if told[names[0]] and not any(value for name in names for value in told[name].values()):
                total, free = told["sgray:max_total_num_tokens"], told["sgray:kv_available_tokens"]
                cached = told["sgray:kv_evictable_tokens"]
                return int(sum(total[name] - free[name] - cached[name] for name in total))
        time.sleep(0.5)
    raise TimeoutError("the service does not become idle")


def figures(url: str) -> dict[str, dict[str, float]]:
    """What the service tells of its engines: by name and replica."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        family.name: {sample.labels["replica"]: sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
        if family.samples and "replica" in family.samples[0].labels
    }
