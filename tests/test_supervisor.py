from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sgray.errors import ConfigError
from sgray.launch_server import free_ports
from sgray.supervisor import ServerDiedError, is_healthy, require_free_port, run_server

SERVER = """
    import http.server, os, signal, subprocess, sys
    notes, port, stubborn = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "stubborn"
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *args): pass
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(notes, "w") as file:
        file.write(f"{os.getpid()} {grandchild.pid} {os.environ['SGRAY_TEST_DEFAULT']}")
    if stubborn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = http.server.HTTPServer(("127.0.0.1", port), Health)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgray.supervisor.STOP_TIMEOUT_S", 2.0)
    monkeypatch.setattr("sgray.supervisor.LINGER_S", 1.0)


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def serve_until_ready(tmp_path: Path, port: int, number: signal.Signals, mode: str) -> tuple[list[str], list[str]]:
    """Runs the small server, sends ourselves the signal when it is ready; the URLs told and the server's notes."""
    notes = tmp_path / "notes"
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        assert is_healthy(url)
        os.kill(os.getpid(), number)

    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(notes), str(port), mode]
    run_server(command, "127.0.0.1", port, defaults={"SGRAY_TEST_DEFAULT": "default"}, on_ready=ready)
    return urls, notes.read_text().split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_everything_it_started(tmp_path: Path, port: int, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    urls, (server, grandchild, _) = serve_until_ready(tmp_path, port, number, "polite")
    assert urls == [f"http://127.0.0.1:{port}"]
    assert not is_alive(int(server))
    assert not is_alive(int(grandchild))
    assert signal.getsignal(number) is before


def test_a_server_that_ignores_the_first_signal_is_ended_all_the_same(tmp_path: Path, port: int) -> None:
    _, (server, grandchild, _) = serve_until_ready(tmp_path, port, signal.SIGINT, "stubborn")
    assert not is_alive(int(server))
    assert not is_alive(int(grandchild))


def test_what_the_user_set_wins_over_the_defaults(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGRAY_TEST_DEFAULT", "mine")
    _, notes = serve_until_ready(tmp_path, port, signal.SIGTERM, "polite")
    assert notes[2] == "mine"


def test_a_server_that_ends_by_itself_is_an_error(port: int) -> None:
    with pytest.raises(ServerDiedError, match="status 3"):
        run_server([sys.executable, "-c", "raise SystemExit(3)"], "127.0.0.1", port, defaults={}, on_ready=print)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_busy_port_is_refused_before_anything_starts(host: str) -> None:
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on {host}:{port} .*--port"):
            run_server(["/does/not/exist"], host, port, defaults={}, on_ready=print)
    require_free_port(host, port)


def test_nothing_is_healthy_where_nobody_listens(port: int) -> None:
    assert not is_healthy(f"http://127.0.0.1:{port}")


def test_a_server_that_is_not_ready_yet_is_waited_for(tmp_path: Path, port: int) -> None:
    begin = time.monotonic()
    waiting = threading.Event()
    command = [sys.executable, "-c", "import time; time.sleep(1.5); raise SystemExit(7)"]
    with pytest.raises(ServerDiedError, match="status 7"):
        run_server(command, "127.0.0.1", port, defaults={}, on_ready=lambda url: waiting.set())
    assert time.monotonic() - begin >= 1.5
    assert not waiting.is_set()


def test_a_server_ends_with_who_holds_its_lifeline(tmp_path: Path, port: int) -> None:
    notes = tmp_path / "notes"
    lifeline, held = os.pipe()
    os.write(held, b"whatever is said is not looked at")
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(notes), str(port), "polite"]
    defaults = {"SGRAY_TEST_DEFAULT": "default"}
    run_server(command, "127.0.0.1", port, defaults=defaults, on_ready=lambda url: os.close(held), lifeline=lifeline)
    os.close(lifeline)
    server, grandchild, *_ = notes.read_text().split()
    assert not is_alive(int(server)) and not is_alive(int(grandchild))
