"""`sgray bench kernels` measures and checks every kernel; here on tiny sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sgray.bench import kernels
from sgray.bench.kernel_rig import Rig, Sizes
from sgray.bench.stopwatch import Stopwatch

TINY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden=32,
    inner=32,
    vocab=96,
    page_size=16,
    decode=(("2 x 4", (4, 4)), ("ragged", (1, 18))),
    shared=(("2 x 2 over 16 + 3", 2, 2, 16, 3),),
    extend=(("1 x 20", 1, 0, 20), ("1 x 4 after 16", 1, 16, 4)),
    extend_shared=(("2 x 4 after 16", 2, 16, 4),),
    tokens=(3,),
    few_rows=(2,),
    sampled_rows=(1,),
    read_values=2**16,
    read_programs=(2, 4),
    matmul=16,
)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Rig:
    monkeypatch.setattr("sgray.bench.kernel_rig.MOST_SETS", 2)
    return Rig(device, TINY, Stopwatch(device, rounds=1))


def test_every_section_and_check_gives_figures(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    document = kernels.measure(rig, list(kernels.SECTIONS))
    assert document["errors"] == {}
    assert list(document["sections"]) == list(kernels.SECTIONS)
    assert [len(section["rows"]) for section in document["sections"].values()] == [2, 1, 2, 1, 3, 5, 3]
    for section in document["sections"].values():
        assert all(0 < row["us"] < math.inf for row in section["rows"])
    assert all(0 <= error < 0.03 for error in document["checks"].values())
    assert json.loads(json.dumps(document)) == document
    shown = capsys.readouterr().out
    assert all(text in shown for text in kernels.SECTIONS.values())
