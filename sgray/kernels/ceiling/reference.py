"""Sums of equal stretches in plain torch."""

from __future__ import annotations

from torch import Tensor


def read_sum(values_N: Tensor, sums_P: Tensor) -> None:
    """See the contract of this folder. Modifies `sums_P`."""
    sums_P.copy_(values_N.view(sums_P.shape[0], -1).sum(dim=1))
