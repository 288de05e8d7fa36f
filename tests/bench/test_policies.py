"""Policies beside each other, on real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgray.bench.policies import POLICIES
from sgray.cli import main
from sgray.supervisor import require_free_port


def test_each_policy_gets_a_server_of_its_own_and_the_same_load(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    port = 28177
    figures = tmp_path / "figures.json"
    sizes = ["--groups=3", "--group-size=3", "--prefix-len=160", "--input-len=8", "--output-len=2", "--concurrency=1"]
    assert main(["bench", "policies", f"--port={port}", f"--json={figures}", *sizes]) == 0
    printed = capsys.readouterr().out
    measured = json.loads(figures.read_text())
    assert tuple(measured) == POLICIES
    for policy, one in measured.items():
        assert policy in printed
        assert one["requests"] == 9 and one["failed"] == 0
        assert one["input_tokens"] == 9 * 168
    assert measured["cost"]["hit_percent"] >= 95
    require_free_port("127.0.0.1", port)  # the servers are gone
