"""A policy on a real server of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgray.cli import main
from sgray.supervisor import require_free_port


def test_a_policy_gets_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    port = 28177
    figures = tmp_path / "figures.json"
    sizes = ["--groups=3", "--group-size=3", "--prefix-len=160", "--input-len=8", "--output-len=2", "--concurrency=1"]
    where = [f"--port={port}", f"--json={figures}"]
    assert main(["bench", "policies", "--policies=cost", *where, *sizes]) == 0
    printed = capsys.readouterr().out
    measured = json.loads(figures.read_text())
    assert tuple(measured) == ("cost",)
    for policy, one in measured.items():
        assert policy in printed
        assert one["requests"] == 9 and one["failed"] == 0
        assert one["input_tokens"] == 9 * 168
    assert measured["cost"]["hit_percent"] >= 95
    require_free_port("127.0.0.1", port)  # the servers are gone


def test_a_policy_that_does_not_exist_is_named(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "policies", "--policies=cost,sideways"]) != 0
    assert "sideways" in capsys.readouterr().err
