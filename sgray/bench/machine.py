"""Under which conditions a figure was taken: command, commit, versions, GPU with its clocks. No torch, no engine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
_REPOSITORY = Path(__file__).parents[2]


def conditions() -> dict[str, Any]:
    """What is to stand beside figures; None for what this machine does not tell."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "torch": version("torch"),
        "triton": version("triton"),
        "gpu": gpu(),
    }


def version(distribution: str) -> str | None:
    """The installed version, if it is installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def gpu() -> dict[str, str] | None:
    """Name, driver, clocks (MHz), power (W) and temperature (C) of the first GPU, now; from nvidia-smi."""
    line = _output(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits", "--id=0"])
    return None if line is None else dict(zip(_GPU_FIELDS, line.split(", "), strict=False))


def _commit() -> str | None:
    """The commit of the checkout that this package lies in; none for an installed package."""
    if not (_REPOSITORY / ".git").exists():
        return None
    return _output(["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])


def _output(command: Sequence[str]) -> str | None:
    """What a program prints, without the line's end; None where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
