"""Products of rows with the weight of their group in plain torch, block by block."""

from __future__ import annotations

from torch import Tensor

from sgray.kernels.grouped_linear.groups import Groups


def grouped_linear(
    x_RI: Tensor,
    weight_EOI: Tensor,
    groups: Groups,
    out_SO: Tensor,
    *,
    in_rows_P: Tensor | None = None,
    out_rows_P: Tensor | None = None,
    scales_P: Tensor | None = None,
) -> None:
    """See the contract of this folder. Modifies `out_SO`."""
    for group, first, last in groups.blocks_3B.T.tolist():
        places = slice(first, min(first + groups.block_rows, last))
        rows = x_RI[places] if in_rows_P is None else x_RI[in_rows_P[places]]
        y = rows.float() @ weight_EOI[group].float().T
        if scales_P is not None:
            y *= scales_P[places, None]
        out_SO[places if out_rows_P is None else out_rows_P[places]] = y.to(out_SO.dtype)
