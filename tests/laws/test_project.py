"""Laws on the project around the package: versions agree, scripts run, nothing of one machine is named."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sgray import __version__

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/life_of_a_request.md",
    "docs/adding_a_model.md",
    "docs/deploying.md",
    "docs/batches.md",
    "docs/language.md",
    "docs/performance.md",
    "docs/routing.md",
]
SCRIPTS = [ROOT / "scripts/setup", ROOT / "scripts/test", ROOT / "scripts/serve", ROOT / ".ci/run"]


def test_the_version_is_one() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared.group(1) == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_sound_shell(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    assert "scripts/test\n" in (ROOT / ".ci/run").read_text()
    assert "scripts/test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:sgray|tests|configs|docs|examples|scripts)/[\w./-]*\w)`", text))
    named |= {str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT)) for link in local_links(text)}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def local_links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
