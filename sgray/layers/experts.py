"""The chosen experts of every token, computed one expert after the other in plain torch.

Each product is one expert's, over the tokens that chose it, and a token's results are added in the order of its own
choice: neither depends on which other tokens are there. How many tokens an expert has is asked of the device, which a
CPU answers at once; on a GPU it would have to be waited for, and `KernelExperts` does not ask.

Shape letters: T tokens, K experts a token, P = T * K pairs of both, E experts of this rank, I hidden size, F inner
size, O = 2F.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.kernels.grouped_linear.groups import sort_by_group
from sgray.layers.quant.unquantized import matrix_product

ExpertsOp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(T, I) for tokens (T, I), the numbers of their experts (T, K) and their weights (T, K, float32). Numbers count from
this rank's first expert; any that is not one of its E adds nothing."""

MakeExperts = Callable[[Tensor, Tensor], ExpertsOp]
"""From the weights of gate and up, one below the other, (E, 2F, I), and those of the last product, (E, I, F)."""


class TorchExperts:
    """Experts on any device; their weights are kept as this device multiplies them fastest."""

    def __init__(self, gate_up_EOI: Tensor, down_EIF: Tensor) -> None:
        self._gate_up = [matrix_product(weight_OI) for weight_OI in gate_up_EOI]
        self._down = [matrix_product(weight_IF) for weight_IF in down_EIF]

    def __call__(self, x_TI: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_active = experts_TK.shape[1]
        order_P, starts = sort_by_group(experts_TK.flatten(), len(self._down))
        weights_P = weights_TK.flatten()
        parts_PI = torch.zeros(len(order_P), x_TI.shape[1], device=x_TI.device)  # in float32, as they are added up
        bounds = starts.tolist()
        for expert, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                pairs = order_P[first:last]
                gate, up = self._gate_up[expert](x_TI[pairs // num_active]).chunk(2, dim=-1)
                y = self._down[expert](F.silu(gate).mul_(up))
                parts_PI[pairs] = y * weights_P[pairs, None]
        return parts_PI.view(-1, num_active, x_TI.shape[1]).sum(1)
