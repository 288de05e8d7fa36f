"""Numbers to tables: percentiles, aligned text, JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank); 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(0, int(rank) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99."""
    mean = sum(values) / len(values) if values else 0.0
    return {"mean": mean, **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES}}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: the first to the left, the others to the right; floats with three significant digits or more."""
    cells = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in line).rstrip()
        for line in (enumerate(zip(row, widths, strict=True)) for row in cells)
    )


def write_json(path: str | None, document: Any) -> None:
    """Writes the document, if there is a path."""
    if path is not None:
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _text(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    if abs(cell) >= 100:
        return f"{cell:.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.3g}"
