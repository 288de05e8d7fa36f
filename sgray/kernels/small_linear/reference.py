"""Products of few rows in plain torch. Knows nothing of forms or launches: `pdl` means nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import silu

if TYPE_CHECKING:
    from sgray.kernels.small_linear.kernel import SmallWeight


def linear(
    x_TI: Tensor,
    weight: SmallWeight,
    out_TO: Tensor,
    *,
    bias_O: Tensor | None = None,
    into_residual: bool = False,
    pdl: bool = False,
) -> None:
    """See the contract of this folder. Modifies `out_TO`."""
    y_TO = x_TI.float() @ weight.weight_OI.float().T
    if bias_O is not None:
        y_TO += bias_O.float()
    if weight.is_gated:
        gate_TF, up_TF = y_TO.chunk(2, dim=-1)
        y_TO = silu(gate_TF) * up_TF
    out_TO.copy_(out_TO + y_TO if into_residual else y_TO)
