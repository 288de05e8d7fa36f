"""The page's tables come from the result files, whichever there are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sgray.bench import peers

ROOT = Path(__file__).parents[2]
OFFLINE = {
    "workloads": {name: {"s": pair.best / 2} for name, pair in peers.OFFLINE_S.items()},
    "command": "sgray bench offline",
    "commit": "abc",
    "gpu": {"name": "NVIDIA H200"},
}
HTTP = {"workloads": {name: dict(sides["vllm"]) for name, sides in peers.HTTP.items()}, "ready_s": 30}
KERNELS = {
    "ceilings": {"read_gb_s": 4600.0, "matmul_tflop_s": 660.0},
    "sections": {
        "decode": {"rows": [{"case": "1 x 1024", "us": 6.5, "% of read": 14.0, "cuDNN us": None}]},
        "linear": {"rows": [{"case": "qkv, 1", "us": 13.4, "% of read": 81.0, "is used": True}]},
    },
}


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot", ROOT / "benchmarks" / "plot.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty place for results, with the page as it is in the repository."""
    (tmp_path / "page.md").write_text((ROOT / "docs" / "performance.md").read_text())
    return tmp_path


def run(plot: ModuleType, folder: Path, *flags: str, **documents: Any) -> str:
    """The page after `documents` became result files and the script ran."""
    for name, document in documents.items():
        (folder / f"h200_{name}.json").write_text(json.dumps(document))
    page = folder / "page.md"
    argv = ["--results", str(folder), "--page", str(page), "--plots", str(folder / "plots"), *flags]
    assert plot.main(argv) == 0
    return page.read_text()


def test_without_results_the_page_stays_as_it_is(plot: ModuleType, folder: Path) -> None:
    before = (folder / "page.md").read_text()
    assert run(plot, folder, "--no-plots") == before


def test_offline_figures_stand_beside_the_peers(plot: ModuleType, folder: Path) -> None:
    text = run(plot, folder, "--no-plots", offline=OFFLINE)
    assert "| `thr_1000_isl1024_osl256` | 21 | 44.9 | 42.1 | 2.00 |" in text
    assert "sglang 4.85 ms, vllm 4.99 ms" in text
    assert "Taken with `sgray bench offline`, commit abc, NVIDIA H200." in text


def test_http_figures_have_a_row_for_each_server(plot: ModuleType, folder: Path) -> None:
    text = run(plot, folder, "--no-plots", http=HTTP)
    assert "| `http_bs1_isl1024_osl257` | sgray | 4.71 |" in text
    assert text.count("| vllm |") == 3
    assert "Ready after 30 s (sgray), 172 s (sglang), 219 s (vllm)" in text


def test_kernel_tables_show_a_dash_for_what_was_not_measured(plot: ModuleType, folder: Path) -> None:
    text = run(plot, folder, "--no-plots", kernels=KERNELS)
    assert "4600 GB/s read, 660 TFLOP/s sustained" in text
    assert "| 1 x 1024 | 6.5 | 14 | - |" in text
    assert "| qkv, 1 | 13.4 | 81 | True |" in text


def test_running_twice_changes_nothing_and_other_sections_stay(plot: ModuleType, folder: Path) -> None:
    before = (folder / "page.md").read_text()
    first = run(plot, folder, "--no-plots", offline=OFFLINE)
    assert run(plot, folder, "--no-plots", offline=OFFLINE) == first
    assert first.partition("## HTTP")[2] == before.partition("## HTTP")[2]
    assert first.partition("## Offline")[0] == before.partition("## Offline")[0]


def test_a_page_without_the_marks_is_an_error(plot: ModuleType, folder: Path) -> None:
    (folder / "page.md").write_text("nothing\n")
    with pytest.raises(SystemExit, match="no marks for 'offline'"):
        run(plot, folder, "--no-plots", offline=OFFLINE)


def test_every_result_file_gives_a_plot_that_repeats_to_the_byte(plot: ModuleType, folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the extra `bench`")
    documents = {"offline": OFFLINE, "http": HTTP, "kernels": KERNELS}
    run(plot, folder, **documents)
    drawn = {path.name: path.read_bytes() for path in (folder / "plots").iterdir()}
    assert sorted(drawn) == ["http.svg", "kernels.svg", "offline.svg"]
    assert all(text in drawn["offline.svg"].decode() for text in ("sgray", "bs1_isl1024_osl1", "vllm"))
    run(plot, folder, **documents)
    assert {path.name: path.read_bytes() for path in (folder / "plots").iterdir()} == drawn
