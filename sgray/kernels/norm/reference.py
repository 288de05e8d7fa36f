"""Residual addition and RMS norm in plain torch. Knows nothing of launches: `pdl` means nothing here."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(
    residual_TI: Tensor, delta_TI: Tensor | None, weight_I: Tensor, eps: float, out_TI: Tensor, *, pdl: bool = False
) -> None:
    """See the contract of this folder. Modifies `residual_TI` and `out_TI`."""
    if delta_TI is not None:
        residual_TI += delta_TI.float()
    scale_T1 = torch.rsqrt(residual_TI.square().mean(-1, keepdim=True) + eps)
    out_TI.copy_(residual_TI * scale_T1 * weight_I.float())
