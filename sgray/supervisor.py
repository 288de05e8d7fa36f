"""Runs a server as a child process: says when it answers, and leaves nothing behind.

Knows processes and one health URL; knows nothing of models, requests or Ray.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sgray.errors import ConfigError, SgrayError

POLL_S = 0.2
STOP_TIMEOUT_S = 45.0
LINGER_S = 5.0


class ServerDiedError(SgrayError):
    """The server ended although nobody asked it to."""


def run_server(
    command: Sequence[str],
    host: str,
    port: int,
    *,
    defaults: Mapping[str, str],
    on_ready: Callable[[str], None],
    lifeline: int | None = None,
) -> None:
    """Runs a server until SIGINT or SIGTERM; `on_ready(url)` is called once, when its /health answers 200.

    `lifeline` is a descriptor of a pipe whose other end somebody holds: when nobody does any more, in whatever way that
    process ended, the server ends as well. `defaults` are environment variables for the server; those that are set
    already win. Modifies this process's handlers of both signals for the time of the call. Raises ConfigError if the
    port is taken, ServerDiedError if the server ends by itself. Afterwards no process of the server is left.
    """
    require_free_port(host, port)
    with _interruptible() as stopped:
        environment = {**defaults, **os.environ}
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            is_over = stopped if lifeline is None else lambda: stopped() or _is_cut(lifeline)
            _watch(child, f"http://{_reachable(host)}:{port}", on_ready, is_over)
        finally:
            stop_server(child)


def require_free_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen on the address now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None


def is_healthy(url: str) -> bool:
    """Whether the server at `url` answers 200 to /health."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:  # noqa: S310 (always http)
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _watch(
    child: subprocess.Popen[bytes], url: str, on_ready: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    ready = False
    while not stopped():
        if (status := child.poll()) is not None:
            raise ServerDiedError(f"the server ended by itself with status {status}; its messages are above")
        if not ready and is_healthy(url):
            ready = True
            on_ready(url)
        time.sleep(POLL_S)


def _is_cut(lifeline: int) -> bool:
    """Whether the other end is closed; what comes through is not looked at."""
    return bool(select.select([lifeline], [], [], 0)[0]) and os.read(lifeline, 4096) == b""


def stop_server(child: subprocess.Popen[bytes]) -> None:
    """Asks the server to go, insists after a while, and clears away what outlived it in its session."""
    for number, patience_s in ((signal.SIGINT, STOP_TIMEOUT_S), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if child.poll() is not None:
            break
        child.send_signal(number)
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    if left := _await_end(child.pid, LINGER_S):
        for pid in left:
            _kill(pid)
        _await_end(child.pid, LINGER_S)


def _await_end(session: int, patience_s: float) -> list[int]:
    """Waits until a session has no process left; those that it still has when patience ends."""
    deadline = time.monotonic() + patience_s
    while (left := _session_members(session)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _session_members(session: int) -> list[int]:
    """The processes of a session, from /proc; none where there is no /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        state, session_id = fields[0], int(fields[3])
        if session_id == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """While inside, SIGINT and SIGTERM set a mark, which the yielded function reads, instead of ending the process."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _reachable(host: str) -> str:
    """An address on which a server that listens on `host` can be asked from this machine."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
