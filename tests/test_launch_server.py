from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sgray.config import Config
from sgray.errors import ConfigError
from sgray.launch_server import (
    REPLICA_PORTS,
    free_ports,
    main,
    ray_defaults,
    read_serve_file,
    ready_text,
    replica_ports,
    serve_document,
)

ROOT = Path(__file__).parents[1]
READY_S = 240.0  # generous: a busy machine with two cores; it takes about 30 s on a quiet one


def test_a_serve_document_can_be_read_back(tmp_path: Path) -> None:
    config = Config.parse({"model": {"model_path": "m", "dtype": "float32"}, "serve": {"max_replicas": 3}})
    path = tmp_path / "serve.yaml"
    path.write_text(json.dumps(serve_document(config, "0.0.0.0", 30000)))
    assert read_serve_file(path) == ("0.0.0.0", 30000, [config])


def test_the_shipped_serve_files_are_sound() -> None:
    for path in sorted((ROOT / "configs").glob("serve*.yaml")):
        host, port, configs = read_serve_file(path)
        assert (bool(host), 0 < port < 65536, len(configs) > 0) == (True, True, True), path


@pytest.mark.parametrize("text", ["[1, 2]", "applications: {", "http_options: {port: 1}", "", "applications: [3]"])
def test_a_file_that_is_no_serve_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml is no Serve configuration file"):
        read_serve_file(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--serve-file", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_a_wrong_key_in_the_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications: [{args: {model: {modle_path: x}}}]")
    with pytest.raises(ConfigError, match="did you mean 'model_path'"):
        read_serve_file(path)


def test_flags_beside_a_serve_file_are_refused_rather_than_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--serve-file", "configs/serve.yaml", "--dtype", "float32"]) == 1
    assert "--dtype belongs in it" in capsys.readouterr().err


def test_the_ready_text_has_one_line_to_paste_and_sglangs_line() -> None:
    first, second = ready_text("http://127.0.0.1:8000", ["the-model"]).splitlines()
    assert first.startswith("sgray is ready: curl http://127.0.0.1:8000/v1/chat/completions -H ")
    body = json.loads(first[first.index("{") : first.rindex("}") + 1])
    assert (body["model"], body["temperature"]) == ("the-model", 0)
    assert second == "The server is fired up and ready to roll!"


def test_the_ready_text_of_a_server_with_keys_has_a_place_for_one() -> None:
    first, _ = ready_text("http://127.0.0.1:8000", ["m"], has_keys=True).splitlines()
    assert "-H 'x-api-key: YOUR_KEY'" in first
    assert "x-api-key" not in ready_text("http://127.0.0.1:8000", ["m"])


def test_a_wrong_key_file_is_told_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("secret words\n")
    for name in ("keys", "no-such-file"):
        assert main(["--port", str(free_ports(1)[0]), "--api-keys-file", str(tmp_path / name)]) == 1
        told = capsys.readouterr().err
        assert f"api.api_keys_file: {tmp_path / name}" in told and "secret" not in told


def test_a_key_variable_that_is_empty_does_not_start_an_open_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGRAY_API_KEYS", "")
    assert main(["--port", str(free_ports(1)[0])]) == 1
    assert "SGRAY_API_KEYS is set but holds no key" in capsys.readouterr().err


def test_haproxy_is_private_to_the_server(tmp_path: Path) -> None:
    with_haproxy = ray_defaults(tmp_path, range(20_001, 20_011))
    assert with_haproxy["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    files = [value for name, value in with_haproxy.items() if name.startswith("RAY_SERVE_HAPROXY") and "/" in value]
    assert len(files) == 5
    assert all(value.startswith(str(tmp_path)) for value in files)
    names = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
    assert len({with_haproxy[f"RAY_SERVE_{name}_PORT"] for name in names}) == 4
    bounds = [with_haproxy[f"RAY_SERVE_DIRECT_INGRESS_{name}_HTTP_PORT"] for name in ("MIN", "MAX")]
    assert bounds == ["20001", "20010"]
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in ray_defaults(tmp_path, None)


def test_no_two_servers_have_a_port_for_replicas_in_common() -> None:
    with replica_ports() as first, replica_ports() as second:
        assert len(first) == len(second) == REPLICA_PORTS.step - 1
        assert not set(first) & set(second)
        with pytest.raises(ConfigError, match="no ports are left"), contextlib.ExitStack() as held:
            for _ in REPLICA_PORTS:
                held.enter_context(replica_ports())
    with replica_ports() as again, pytest.raises(OSError, match="of the body"):
        assert again == first
        with replica_ports():
            raise OSError("of the body")


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_busy_port_is_told_before_a_model_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model-path", "./no/such/model", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_missing_model_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", "./no/such/model", "--port", str(free_ports(1)[0])]) == 1
    assert "no/such/model" in capsys.readouterr().err


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tp", "2"], "9 query heads cannot be shared evenly by 2 ranks"),
        (["--context-length", "100000"], "above the model's own limit of 8192"),
    ],
)
def test_what_the_model_cannot_do_is_told_before_anything_starts_pub_125(
    flags: list[str], told: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-path", str(model_dir), "--port", str(free_ports(1)[0]), *flags]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("number", "proxy"), [(signal.SIGINT, []), (signal.SIGTERM, ["--no-haproxy"])])
def test_the_server_comes_up_answers_and_leaves_no_process(
    model_dir: Path, tmp_path: Path, number: signal.Signals, proxy: list[str]
) -> None:
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "sgray.launch_server", "--model-path", str(model_dir), "--port", str(port), *proxy]
    command += ["--served-model-name", "small", "--num-cpus-per-replica", "0.5", "--max-total-tokens", "4096"]
    command += ["--device", "cpu", "--dtype", "float32"]
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = await_ready(server, log)
        children = descendants(server.pid)
        assert url == f"http://127.0.0.1:{port}"
        answer = ask(f"{url}/v1/chat/completions", "small")
        assert "Paris" in answer["choices"][0]["message"]["content"]
    finally:
        server.send_signal(number)
        status = server.wait(120)
    assert status == 0, log.read_text()
    assert len(children) > 3
    assert [pid for pid in children if is_alive(pid)] == []


def await_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The URL in the server's ready line."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None:
        text = log.read_text()
        if "The server is fired up and ready to roll!" in text:
            return text.partition("sgray is ready: curl ")[2].partition("/v1/")[0]
        time.sleep(0.2)
    raise AssertionError(f"not ready; status {server.poll()}\n{log.read_text()}")


def ask(url: str, model: str) -> dict[str, Any]:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": question, "temperature": 0, "max_tokens": 16}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def descendants(root: int) -> list[int]:
    """All processes below `root`, from /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, layer = [], [root]
    while layer:
        layer = [pid for pid, parent in parents.items() if parent in layer]
        found += layer
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
