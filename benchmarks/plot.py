"""Draws docs/plots/*.svg and writes the tables of docs/performance.md from benchmarks/results/*.json.

Works with whichever result files exist: `h200_{offline,steps,kernels}.json` as `sgray bench` writes them, and
`h200_http.json` with {"workloads": {name: {"tpot_ms", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "out_tok_s"}},
"ready_s": ...}. Needs the extra `bench` for the plots; the tables need nothing but the package.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgray.bench import peers
from sgray.bench.offline import token_ms

ROOT = Path(__file__).resolve().parent.parent
HTTP_COLUMNS = {
    "tpot_ms": "per token, ms",
    "ttft_ms_p50": "first token p50, ms",
    "itl_ms_p50": "gap p50, ms",
    "itl_ms_p99": "gap p99, ms",
    "out_tok_s": "tokens/s",
}
ENGINES = ("sgray", "sglang", "vllm")
COLOURS = {"sgray": "#1b6ca8", "sglang": "#c9822b", "vllm": "#8a8a8a"}

Document = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Brings page and plots up to date; prints what it wrote."""
    parser = argparse.ArgumentParser(description="Tables and plots of docs/performance.md from the result files.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots")
    parser.add_argument("--no-plots", action="store_true", help="tables alone, without matplotlib")
    arguments = parser.parse_args(argv)
    results = load_results(arguments.results)
    text = arguments.page.read_text(encoding="utf-8")
    for name, document in results.items():
        text = replaced(text, name, SECTIONS[name](document))
    arguments.page.write_text(text, encoding="utf-8")
    print(f"{arguments.page.name}: {', '.join(results) or 'no result files'}")
    if not arguments.no_plots:
        draw(results, arguments.plots)
    return 0


def load_results(folder: Path) -> dict[str, Document]:
    """The documents that exist, by the name of their section."""
    paths = {name: folder / f"h200_{name}.json" for name in SECTIONS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def replaced(text: str, name: str, section: str) -> str:
    """`text` with what stands between the marks of section `name` replaced; the page must have the marks."""
    pattern = rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)"
    new, count = re.subn(pattern, lambda found: found[1] + "\n" + section + "\n\n" + found[2], text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the page has no marks for {name!r}")
    return new


def offline_section(document: Document) -> str:
    """Seconds of every workload beside the peers', and the time per token."""
    rows = []
    for name, figures in document["workloads"].items():
        pair = peers.OFFLINE_S.get(name)
        others = [number(pair.sglang), number(pair.vllm), f"{pair.best / figures['s']:.2f}"] if pair else ["", "", ""]
        rows.append([f"`{name}`", number(figures["s"]), *others])
    header = ["workload", "sgray, s", "SGLang, s", "vLLM, s", "better peer / sgray"]
    lines = [markdown(header, rows)]
    sides = {"sgray": {name: figures["s"] for name, figures in document["workloads"].items()}}
    sides |= {engine: {name: getattr(pair, engine) for name, pair in peers.OFFLINE_S.items()} for engine in ENGINES[1:]}
    tokens = {engine: token_ms(seconds) for engine, seconds in sides.items()}
    if tokens["sgray"] is not None:
        lines.append("Time per token of one sequence: " + ", ".join(f"{who} {ms:.2f} ms" for who, ms in tokens.items()))
    return "\n\n".join([*lines, *origin(document)])


def http_section(document: Document) -> str:
    """Latencies and rate of every load, three rows each, and how long a start takes."""
    rows = []
    for name, figures in document["workloads"].items():
        sides = {"sgray": figures, **peers.HTTP.get(name, {})}
        rows += [
            [f"`{name}`" if engine == "sgray" else "", engine, *(number(side.get(key)) for key in HTTP_COLUMNS)]
            for engine, side in sides.items()
        ]
    lines = [markdown(["load", "server", *HTTP_COLUMNS.values()], rows)]
    if "ready_s" in document:
        ready = {"sgray": document["ready_s"], **peers.READY_S}
        lines.append("Ready after " + ", ".join(f"{seconds:.0f} s ({who})" for who, seconds in ready.items()))
    return "\n\n".join([*lines, *origin(document)])


def steps_section(document: Document) -> str:
    """How long a decode step takes, how much of it nothing runs, and where the rest goes."""
    rows = [
        [batch, number(figures["step_us"]), number(100 * figures["idle"])]
        for batch, figures in document["batches"].items()
    ]
    lines = [markdown(["batch", "us a step", "idle, %"], rows)]
    for batch, figures in document["batches"].items():
        groups = [
            [name, number(one["us"]), number(one["limit_us"]), number(one["us"] - one["limit_us"])]
            for name, one in figures["groups"].items()
        ]
        kernels = [
            [f"`{name}`", number(one["us"]), number(one["count"]), number(100 * one["share"])]
            for name, one in list(figures["kernels"].items())[:NUM_KERNELS]
        ]
        lines += [
            f"### A step of {batch}",
            markdown(["kernels", "us", "limit, us", "above it, us"], groups),
            markdown(["kernel", "us", "launches", "% of the step"], kernels),
        ]
    return "\n\n".join([*lines, *origin(document)])


def kernels_section(document: Document) -> str:
    """The ceilings, then one table for each section."""
    ceilings = document["ceilings"]
    lines = [f"Ceilings: {ceilings['read_gb_s']:.0f} GB/s read, {ceilings['matmul_tflop_s']:.0f} TFLOP/s sustained"]
    for name, section in document["sections"].items():
        header = list(section["rows"][0])
        rows = [[number(row[column]) for column in header] for row in section["rows"]]
        lines += [f"### {name.capitalize()}", markdown(header, rows)]
    return "\n\n".join([*lines, *origin(document)])


NUM_KERNELS = 10
SECTIONS: Mapping[str, Callable[[Document], str]] = {
    "offline": offline_section,
    "steps": steps_section,
    "http": http_section,
    "kernels": kernels_section,
}


def origin(document: Document) -> list[str]:
    """How the figures were taken, as far as the file tells, and its note on them if it has one."""
    gpu = document.get("gpu") or {}
    parts = [
        f"`{document['command']}`" if document.get("command") else "",
        f"commit {document['commit']}" if document.get("commit") else "",
        gpu.get("name", "") if isinstance(gpu, dict) else str(gpu),
        f"torch {document['torch']}" if document.get("torch") else "",
        f"Triton {document['triton']}" if document.get("triton") else "",
    ]
    known = [part for part in parts if part]
    taken = [f"Taken with {', '.join(known)}."] if known else []
    return [*taken, str(document["note"])] if document.get("note") else taken


def number(value: object) -> str:
    """Three significant digits, a dash for what was not measured; texts stay."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    marks = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, marks, *rows))


def draw(results: Mapping[str, Document], folder: Path) -> None:
    """One SVG for each result file that there is and has a plot."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'sgray[bench]', or use --no-plots") from None
    matplotlib.use("svg")
    # The same figures give the same file, so that a plot changes only when a result does.
    matplotlib.rcParams.update({"svg.hashsalt": "sgray", "svg.fonttype": "none", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        if name not in results:
            continue
        path = folder / f"{name}.svg"
        plot(results[name]).savefig(path, metadata={"Date": None})
        print(path.name)


def offline_plot(document: Document) -> Any:
    """Speed against the better peer's, a bar a workload."""
    seconds = {name: one["s"] for name, one in document["workloads"].items() if name in peers.OFFLINE_S}
    bars = {
        "sgray": [peers.OFFLINE_S[name].best / value for name, value in seconds.items()],
        "sglang": [peers.OFFLINE_S[name].best / peers.OFFLINE_S[name].sglang for name in seconds],
        "vllm": [peers.OFFLINE_S[name].best / peers.OFFLINE_S[name].vllm for name in seconds],
    }
    return grouped(list(seconds), bars, "speed, better peer = 1")


def http_plot(document: Document) -> Any:
    """Tokens a second through HTTP against the better peer's."""
    names = [name for name in document["workloads"] if name in peers.HTTP]
    rates = {
        name: {"sgray": document["workloads"][name]["out_tok_s"]}
        | {engine: side["out_tok_s"] for engine, side in peers.HTTP[name].items()}
        for name in names
    }
    best = {name: max(rates[name]["sglang"], rates[name]["vllm"]) for name in names}
    bars = {engine: [rates[name][engine] / best[name] for name in names] for engine in ENGINES}
    return grouped(names, bars, "output tokens/s, better peer = 1")


def kernels_plot(document: Document) -> Any:
    """Share of the read ceiling of everything that is bound by it."""
    rows = [row for section in document["sections"].values() for row in section["rows"] if "% of read" in row]
    bars = {"sgray": [row["% of read"] for row in rows]}
    return grouped([row["case"] for row in rows], bars, "% of the read ceiling")


PLOTS: Mapping[str, Callable[[Document], Any]] = {
    "offline": offline_plot,
    "http": http_plot,
    "kernels": kernels_plot,
}


def grouped(names: Sequence[str], bars: Mapping[str, Sequence[float]], label: str) -> Any:
    """Horizontal bars, one group a name, the first name on top."""
    from matplotlib.figure import Figure

    thickness = 0.8 / len(bars)
    figure = Figure(figsize=(7.5, 1.0 + 0.18 * len(names) * (1 + len(bars))), layout="constrained")
    axes = figure.subplots()
    for index, (engine, values) in enumerate(bars.items()):
        places = [place + index * thickness for place in range(len(names))]
        axes.barh(places, values, height=thickness, label=engine, color=COLOURS[engine])
    axes.set_yticks([place + 0.4 - thickness / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:
        axes.axvline(1.0, color="black", linewidth=0.6)
        figure.legend(loc="outside upper right", ncols=len(bars), frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
