"""Sums over ranks in plain torch. Instead of an address book `peers` is a function that gives every rank's tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Ask = Callable[[Tensor], Sequence[Tensor]]


def one_shot(x: Tensor, peers: Ask, out: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out`."""
    out.copy_(_sum(peers(x)))


def two_shot(x: Tensor, peers: Ask, out: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out`."""
    out.copy_(_sum(peers(x)))


def add_rms_norm(
    x_TI: Tensor,
    peers: Ask,
    residual_TI: Tensor,
    weight_I: Tensor,
    eps: float,
    out_TI: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """See the contract of this folder. Modifies `residual_TI` and `out_TI`."""
    residual_TI += _sum(peers(x_TI))
    scale_T1 = torch.rsqrt(residual_TI.square().mean(-1, keepdim=True) + eps)
    out_TI.copy_(residual_TI * scale_T1 * weight_I.float())


def all_gather(x_TN: Tensor, peers: Ask, out_TRN: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out_TRN`."""
    out_TRN.copy_(torch.stack(list(peers(x_TN)), dim=1))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total
