"""The service as `serve run FILE` starts it, behind Serve's HAProxy: a process of its own, for Serve reads its switches
when it is imported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from sgray.launch_server import ray_defaults, replica_ports

ROOT = Path(__file__).parents[3]
PORT = 28140


@pytest.fixture(scope="module")
def service(model_dir: Path, service_type: Any) -> Iterator[Any]:
    """The shipped configuration on another port, with a smaller memory."""
    document = yaml.safe_load((ROOT / "configs/serve.yaml").read_text())
    document["http_options"]["port"] = PORT
    arguments = document["applications"][0]["args"]
    arguments["model"]["dtype"] = "float32"
    arguments["memory"] = {"max_total_tokens": 16_384}
    with (
        tempfile.TemporaryDirectory(prefix="sgray-ha-", ignore_cleanup_errors=True) as scratch,
        replica_ports() as ports,
    ):
        serve_file = Path(scratch, "serve.yaml")
        serve_file.write_text(yaml.safe_dump(document))
        environment = os.environ | ray_defaults(Path(scratch), ports)
        environment |= {
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": scratch,
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": str(ROOT),
        }
        with Path(scratch, "output").open("w") as output:
            command = [sys.executable, "-m", "ray.serve.scripts", "run", str(serve_file)]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=ROOT)
        try:
            found = service_type(f"http://127.0.0.1:{PORT}")
            _wait_healthy(process, found.url, Path(scratch, "output"))
            yield found
        finally:
            _stop(process)


def _wait_healthy(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, output.read_text()
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"not healthy in time: {output.read_text()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the service to end, and see that it leaves no process behind."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=15)
    finally:
        for left in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                left.kill()
    assert not [left.name() for left in alive]


@pytest.mark.usefixtures("service")
def test_haproxy_is_what_answers_and_has_a_call_whole_before_it_sends_it() -> None:
    lines = [line.strip() for line in haproxy_file().splitlines()]
    for wanted in ("retry-on conn-failure empty-response", "option http-buffer-request", "tune.bufsize 262144"):
        assert wanted in lines


@pytest.mark.usefixtures("service")
def test_haproxy_sends_calls_to_ports_of_this_server_alone() -> None:
    environment = haproxies()[0].environ()
    low, high = (int(environment[f"RAY_SERVE_DIRECT_INGRESS_{name}_HTTP_PORT"]) for name in ("MIN", "MAX"))
    fallback = int(environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])
    ports = {int(port) for port in re.findall(r"^\s*server \S+ [\d.]+:(\d+)", haproxy_file(), re.MULTILINE)}
    assert fallback in ports and len(ports) > 1
    assert all(low <= port <= high for port in ports - {fallback})


def haproxies() -> list[psutil.Process]:
    """The HAProxy processes of this test's service."""
    return [one for one in psutil.Process().children(recursive=True) if one.name() == "haproxy"]


def haproxy_file() -> str:
    """What Serve wrote for the HAProxy of this test's service."""
    (path,) = {command[command.index("-f") + 1] for command in (process.cmdline() for process in haproxies())}
    return Path(path).read_text()


def test_answers_streams_and_errors(service: Any) -> None:
    client = service.openai(max_retries=0)
    body = service.body("Name three rivers.", max_tokens=40)
    whole = client.chat.completions.create(**body).choices[0].message.content
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    refused = httpx.post(f"{service.url}/v1/chat/completions", json={"model": "other", "messages": []}, timeout=30)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_many_callers_at_once_and_some_that_leave(service: Any) -> None:
    async def ask(client: httpx.AsyncClient, index: int) -> int:
        body = service.body(f"Repeat the number {index}.", max_tokens=8)
        return (await client.post(f"{service.url}/v1/chat/completions", json=body)).status_code

    async def leave(client: httpx.AsyncClient, index: int) -> None:
        body = service.body(f"Tell me a long story, number {index}.", max_tokens=1500, stream=True)
        async with client.stream("POST", f"{service.url}/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())

    async def all_at_once() -> list[Any]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=80)) as client:
            return await asyncio.gather(
                *(ask(client, index) for index in range(48)), *(leave(client, index) for index in range(16))
            )

    answers = asyncio.run(all_at_once())
    assert answers[:48] == [200] * 48
    service.assert_idle()
