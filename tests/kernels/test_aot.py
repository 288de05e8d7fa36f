"""Every configuration that is shipped compiles for Hopper without spills, and for other GPUs at all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AOT = HERE.parent / "support" / "aot.py"
FILES = sorted(HERE.glob("builds_*.py"))
Done = subprocess.CompletedProcess[str]


def compile_all(path: Path) -> Done:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, AOT, path], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Done]]:
    """What compiling a file gave. The chosen are compiled side by side, long ones first: a compiler takes a core."""
    chosen = {item.callspec.params["path"] for item in request.session.items if item.path == Path(__file__)}
    ordered = sorted(chosen, key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started: dict[Path, Future[Done]] = {path: pool.submit(compile_all, path) for path in ordered}
        yield lambda path: started[path].result()
        for one in started.values():
            one.cancel()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("builds_"))
def test_every_build_compiles_cleanly(path: Path, compiled: Callable[[Path], Done]) -> None:
    done = compiled(path)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert reports
    assert [report for report in reports if report["complaints"]] == []
