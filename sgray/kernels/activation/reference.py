"""The gate of the MLP in plain torch. Knows nothing of launches: `pdl` means nothing here."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up_TF: Tensor, out_TF: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out_TF`."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    out_TF.copy_(silu(gate_TF) * up_TF)
