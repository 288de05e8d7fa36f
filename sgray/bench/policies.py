"""Routing policies beside each other: the same grouped load on fresh servers that differ in `routing_policy` alone.

Starts real servers, one after the other, and reports how much of what could have been cached was.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from sgray.bench import report, serve
from sgray.config import DEFAULT_MODEL, RoutingPolicy
from sgray.errors import ConfigError
from sgray.supervisor import is_healthy

POLICIES = ("cost", "round_robin")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
SHARED_FLAGS = ("groups", "group-size", "prefix-len", "input-len", "output-len", "concurrency", "seed")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what to serve (default: %(default)s)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="which, with commas (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="engine replicas (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8077, help="where the servers listen (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="groups with a common prefix (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="requests a group (default: %(default)s)")
    parser.add_argument("--prefix-len", type=int, default=1000, help="tokens a group shares (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=32, help="own prompt tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=8, help="answer tokens (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and their order (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")


def run(arguments: argparse.Namespace) -> int:
    """Runs the load on each policy's server and prints a table; 1 if a request failed."""
    policies = arguments.policies.split(",")
    known = get_args(RoutingPolicy)
    if wrong := [policy for policy in policies if policy not in known]:
        raise ConfigError(f"--policies: no such policy as {wrong[0]!r}; there are {', '.join(known)}")
    figures = {policy: measure(arguments, policy) for policy in policies}
    rows = [
        (policy, one["hit_percent"], one["ttft_ms"]["p50"], one["ttft_ms"]["p99"], one["seconds"], one["failed"])
        for policy, one in figures.items()
    ]
    print(report.table(("policy", "hit %", "TTFT p50 ms", "TTFT p99 ms", "seconds", "failed"), rows))
    print("hit %: cached prompt tokens, of those whose prefix an earlier request of the group had")
    report.write_json(arguments.json, figures)
    return 1 if any(one["failed"] for one in figures.values()) else 0


def measure(arguments: argparse.Namespace, policy: str) -> dict[str, Any]:
    """The figures of one policy on a server of its own."""
    client = argparse.ArgumentParser()
    serve.add_flags(client)
    sizes = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in SHARED_FLAGS]
    with _server(arguments, policy) as url:
        figures = serve.measure(client.parse_args([f"--url={url}", *sizes]))
    cacheable = arguments.groups * (arguments.group_size - 1) * arguments.prefix_len
    figures["hit_percent"] = 100 * figures["cached_tokens"] / max(1, cacheable)
    figures["failed"] = sum(figures["errors"].values())
    return figures


@contextmanager
def _server(arguments: argparse.Namespace, policy: str) -> Iterator[str]:
    """A server whose replicas have all joined; stopped at the end."""
    url = f"http://127.0.0.1:{arguments.port}"
    count = str(arguments.replicas)
    flags = ["--port", str(arguments.port), "--routing-policy", policy, "--num-cpus-per-replica", "0.5"]
    command = [sys.executable, "-m", "sgray.launch_server", "--model-path", arguments.model, *flags]
    child = subprocess.Popen(
        [*command, "--min-replicas", count, "--max-replicas", count],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_replicas(child, url, arguments.replicas)
        yield url
    finally:
        child.terminate()
        child.wait(STOP_TIMEOUT_S)


def _wait_for_replicas(child: subprocess.Popen[bytes], url: str, count: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (is_healthy(url) and _num_replicas(url) >= count):
        if child.poll() is not None or time.monotonic() > deadline:
            raise ConfigError(f"no server with {count} replicas came up at {url}; try `sgray serve` with these flags")
        time.sleep(0.5)


def _num_replicas(url: str) -> int:
    """Replicas that the metrics name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310 (always http)
        return len(set(re.findall(r'replica="([^"]+)"', answer.read().decode())))
