"""Starts the server, sends the HTTP workloads, writes the figures, stops the server.

The server is started as a user starts it, with `sgray serve`. Knows commands and URLs, nothing of the engine.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from client import Load, drive

NAME = "bench"
STOP_S = 90.0


def workloads(factor: int) -> dict[str, Load]:
    """The workloads by name; all lengths and counts are divided by `factor`."""
    whole = {
        "http_bs1_isl1024_osl257": Load(1024, 257, 1, 6),
        "http_c64_isl1024_osl257": Load(1024, 257, 64, 128),
        "http_c256_isl128_osl512": Load(128, 512, 256, 512),
        "http_c64_open": Load(1024, 257, 64, 192, spread_s=2.0),
    }
    return {name: _scaled(load, factor) for name, load in whole.items()}


def _scaled(load: Load, factor: int) -> Load:
    sizes = (load.prompt_len, load.output_len, load.streams, load.requests)
    return Load(*(max(2 if index == 1 else 1, size // factor) for index, size in enumerate(sizes)), load.spread_s)


class Server:
    """The running command; `ready_s` is how long it took until it answered."""

    def __init__(self, command: list[str], url: str, log: Path, limit_s: float) -> None:
        self.url = url
        begin = time.monotonic()
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() - begin > limit_s:
                    raise RuntimeError(f"the server did not start; the end of {log}:\n{_end_of(log)}")
                time.sleep(0.1)
        except BaseException:  # also where this command is told to end
            self.stop()
            raise
        self.ready_s = time.monotonic() - begin

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:  # noqa: S310 (always http)
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> float:
        """Asks the command to end as Ctrl-C does; the seconds that it took."""
        begin = time.monotonic()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return time.monotonic() - begin


def _end_of(log: Path) -> str:
    """The last lines without those of single requests."""
    return "\n".join([line for line in log.read_text(errors="replace").splitlines() if " -- GET /" not in line][-40:])


def serve_command(arguments: argparse.Namespace, flags: list[str]) -> list[str]:
    """The command line of the server."""
    command = [sys.executable, "-m", "sgray", "serve", arguments.model, "--port", str(arguments.port)]
    return [*command, "--served-model-name", NAME, "--num-ingress-replicas", str(arguments.ingresses), *flags]


def run(arguments: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Everything; the figures are on disk after each workload."""
    command = serve_command(arguments, flags)
    loads = workloads(arguments.factor)
    names = arguments.only.split(",") if arguments.only else list(loads)
    server = Server(command, f"http://127.0.0.1:{arguments.port}", arguments.log, arguments.start_limit_s)
    found: dict[str, Any] = {"command": " ".join(command), "ready_s": server.ready_s, "workloads": {}}
    print(f"ready after {server.ready_s:.1f} s", flush=True)
    try:
        _warm_up(server.url, arguments)
        for number, name in enumerate(names):
            figures = drive(server.url, NAME, loads[name], num_processes=arguments.processes, seed=1000 * number + 17)
            found["workloads"][name] = figures
            print(name, json.dumps({key: round(value, 3) for key, value in figures.items()}), flush=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        print(f"stopped in {server.stop():.1f} s", flush=True)
    if arguments.verbose:
        print(_end_of(arguments.log))
    return found


def _warm_up(url: str, arguments: argparse.Namespace) -> None:
    """A short load of each kind, so that nothing is compiled, loaded or connected for the first time when measured."""
    for prompt_len, streams in ((1024, 1), (1024, 64), (128, 256)):
        load = _scaled(Load(prompt_len, 16, streams, streams), arguments.factor)
        figures = drive(url, NAME, load, num_processes=arguments.processes, seed=prompt_len + streams)
        print(f"warm-up, {load.streams} streams: {figures['seconds']:.1f} s", flush=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further flags are handed to the server.")
    parser.add_argument("model", help="the model directory or name")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--ingresses", type=int, default=4, help="ingress replicas (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=8, help="of the client (default: %(default)s)")
    parser.add_argument("--factor", type=int, default=1, help="divide all lengths and counts (default: %(default)s)")
    parser.add_argument("--only", metavar="NAME,...", help="these workloads alone")
    parser.add_argument("--start-limit-s", type=float, default=180.0)
    parser.add_argument("--log", type=Path, default=Path("server.log"), help="the server's output")
    parser.add_argument("--json", type=Path, default=Path("h200_http.json"), help="where the figures go")
    parser.add_argument("--verbose", action="store_true", help="show the end of the server's output")
    arguments, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the server is stopped then too
    run(arguments, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
