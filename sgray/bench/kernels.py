"""`sgray bench kernels`: every kernel on the GPU at the sizes of Llama-3.1-8B, beside torch's and the device's ceiling.

Light to import: torch, Triton and the kernels are loaded when the command runs. Results are checked before times are
taken; what fails is reported and does not stop the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sgray.bench import machine, report
from sgray.errors import ConfigError

if TYPE_CHECKING:
    from sgray.bench.kernel_rig import Rig, Row

SECTIONS = {
    "decode": "decode attention, paged; cuDNN's and FlashAttention's on contiguous keys and values",
    "shared": "decode attention over prefixes that sequences have in common: read by each, and read once",
    "extend": "extend attention, paged, causal",
    "extend_shared": "extends of few tokens over one prefix: with pages of their own, and in the same pages",
    "rows": "work row by row, by number of rows",
    "linear": "products of few rows with a big weight",
    "sampling": "one token a row; torch with sort",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated sections of: {', '.join(SECTIONS)}")
    parser.add_argument(
        "--rounds", type=int, default=20, help="replays of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--pdl", action="store_true", help="launch kernels dependently, as the engine's steps do")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints tables, writes the JSON file; 1 if something failed. ConfigError where no CUDA device is."""
    chosen = choose(arguments.only)
    if arguments.rounds < 1:
        raise ConfigError("--rounds must be at least 1")
    device = _cuda_device()
    from sgray.bench.kernel_rig import Rig, full_sizes
    from sgray.bench.stopwatch import Stopwatch

    rig = Rig(device, full_sizes(), Stopwatch(device, arguments.rounds), pdl=arguments.pdl)
    document = measure(rig, chosen)
    report.write_json(arguments.json, document | {"pdl": arguments.pdl} | machine.conditions())
    return 1 if document["errors"] else 0


def choose(only: str | None) -> list[str]:
    """The sections named in the comma-separated `only`, all if None; raises ConfigError for a wrong name."""
    names = list(SECTIONS) if only is None else [name.strip() for name in only.split(",") if name.strip()]
    if wrong := [name for name in names if name not in SECTIONS]:
        raise ConfigError(f"unknown section {wrong[0]!r}; known are: {', '.join(SECTIONS)}")
    return names


def _cuda_device() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench kernels needs a CUDA device, and none is visible")
    if find_spec("triton") is None:
        raise ConfigError("bench kernels needs Triton: pip install 'sgray[kernels]'")
    return torch.device("cuda", torch.cuda.current_device())


def measure(rig: Rig, names: Iterable[str]) -> dict[str, Any]:
    """Ceilings, checks and the named sections: {"ceilings", "checks", "sections": {name: {"rows", "s"}}, "errors"}."""
    from sgray.bench import kernel_attention, kernel_rows

    errors: dict[str, str] = {}
    ceilings = collect(
        {"read_gb_s": lambda: kernel_rows.read_gb_s(rig), "matmul_tflop_s": lambda: kernel_rows.matmul_tflop_s(rig)},
        errors,
    )
    rig = replace(rig, read_gb_s=ceilings.get("read_gb_s", rig.read_gb_s))
    checks = collect(
        {
            "span_attention": lambda: kernel_attention.check_span(rig),
            "shared spans": lambda: kernel_attention.check_shared(rig),
            "extend_attention": lambda: kernel_attention.check_extend(rig),
            "norm": lambda: kernel_rows.check_norm(rig),
            "activation": lambda: kernel_rows.check_gate(rig),
            "rope_store": lambda: kernel_rows.check_rope(rig),
            "small_linear": lambda: kernel_rows.check_linear(rig),
            "sampling": lambda: kernel_rows.check_sampling(rig),
        },
        errors,
    )
    print(report.table(("ceiling", "value"), list(ceilings.items())))
    print(f"\n{report.table(('kernel', 'largest error'), list(checks.items()))}")
    sections: dict[str, Callable[[Rig], list[Row]]] = {
        "decode": kernel_attention.decode,
        "shared": kernel_attention.shared,
        "extend": kernel_attention.extends,
        "extend_shared": kernel_attention.shared_extends,
        "rows": kernel_rows.rowwise,
        "linear": kernel_rows.linears,
        "sampling": kernel_rows.samples,
    }
    found = collect({name: lambda name=name: _timed(name, sections[name], rig) for name in names}, errors)  # type: ignore[misc]
    return {"ceilings": ceilings, "checks": checks, "sections": found, "errors": errors}


def _timed(name: str, section: Callable[[Rig], list[Row]], rig: Rig) -> dict[str, Any]:
    begin = time.perf_counter()
    rows = section(rig)
    print(f"\n{SECTIONS[name]}\n{rows_table(rows)}", flush=True)
    return {"rows": rows, "s": time.perf_counter() - begin}


def rows_table(rows: list[Row]) -> str:
    """The rows as a table; what could not be measured is a dash."""
    header = list(rows[0])
    return report.table(header, [["-" if row[name] is None else row[name] for name in header] for row in rows])


def collect(works: Mapping[str, Callable[[], Any]], errors: dict[str, str]) -> dict[str, Any]:
    """The results by name; a failure goes to `errors`, so that one kernel does not cost the figures of the others."""
    results: dict[str, Any] = {}
    for name, work in works.items():
        try:
            results[name] = work()
        except Exception as error:  # noqa: BLE001 - a compiler's, a driver's or a check's: all are reported alike
            errors[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {errors[name]}", file=sys.stderr)
    return results
