"""What is found of gangs from outside, and what counts as a run in which all was well."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import loaded
from waiting import until

GOOD = {
    "rounds": {"kill rank": 1, "stop rank": 1},
    "equal": 9,
    "cut": 2,
    "problems": [],
    "different": [],
    "failed": [],
    "leaked_tokens": 0,
    "growth_mib": {"Ingress": 3.0},
}


@pytest.fixture(scope="module")
def kill_ranks() -> Iterator[ModuleType]:
    with loaded("kill_ranks") as module:
        yield module


def test_each_way_to_break_a_gang_comes_equally_often(kill_ranks: ModuleType) -> None:
    counts = Counter(blow.name for blow in kill_ranks._blows(random.Random(1), 50))
    assert sum(counts.values()) == 50 and len(counts) == 3
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": {"kill rank": 1}},
        {"equal": 0},
        {"cut": 0},
        {"problems": ["round 1: leak: store sgray-ranks-a"]},
        {"different": ["text"]},
        {"failed": ["text: 500"]},
        {"leaked_tokens": 16},
        {"growth_mib": {"Ingress": 500.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_run_is_good_if_it_was_played_to_its_end_cut_streams_and_broke_nothing(
    kill_ranks: ModuleType, change: dict[str, object]
) -> None:
    assert kill_ranks.is_good(GOOD, 2)
    assert not kill_ranks.is_good(GOOD | change, 2)


ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # from sgray.engine.rank import"])
"""


@pytest.mark.usefixtures("kill_ranks")
def test_a_rank_whose_replica_is_dead_is_found_by_its_temporary_directory(tmp_path: Path) -> None:
    from processes import has_ended, orphans

    subprocess.run([sys.executable, "-c", ORPHAN], env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    until(lambda: orphans(tmp_path))
    [rank] = orphans(tmp_path)
    assert not orphans(tmp_path / "other")
    rank.kill()
    until(lambda: has_ended(rank))
    assert not orphans(tmp_path)
