"""Every configuration that is shipped compiles for Hopper without spills, and for other GPUs at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AOT = HERE.parent / "support" / "aot.py"
FILES = sorted(HERE.glob("builds_*.py"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("builds_"))
def test_every_build_compiles_cleanly(path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, AOT, path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert reports
    assert [report for report in reports if report["complaints"]] == []
