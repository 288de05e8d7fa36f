from __future__ import annotations

from pathlib import Path

import pytest

from sgray.bench import machine


def test_conditions_name_the_command_and_the_versions() -> None:
    found = machine.conditions()
    assert found["torch"] == machine.version("torch") is not None
    assert "/" not in found["command"].split()[0]


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert machine.version("no-such-distribution-of-anybody") is None


def test_the_gpu_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1, 1980, 3201, 102.5, 700.00, 31'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = machine.gpu()
    assert found is not None
    assert (found["name"], found["clocks.sm"], found["power.limit"]) == ("NVIDIA H200", "1980", "700.00")


@pytest.mark.parametrize("script", ["exit 9", "true"])
def test_a_gpu_tool_that_fails_or_says_nothing_is_no_gpu(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.gpu() is None
