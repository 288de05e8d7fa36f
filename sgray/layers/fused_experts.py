"""The chosen experts of every token on a GPU: three kernels for all experts together, whatever tokens chose them.

Nothing is asked of the device, so a step with experts may be a CUDA graph. Each token's results are added in the order
of its own choice, in float32, and rounded once.

Shape letters: T tokens, K experts a token, P = T * K pairs of both, E experts of this rank, I hidden size, F inner
size, O = 2F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgray.kernels.activation.kernel import silu_mul
from sgray.kernels.grouped_linear.groups import Groups
from sgray.kernels.grouped_linear.kernel import grouped_linear


class KernelExperts:
    """Experts by the kernels of this project; see `ExpertsOp`."""

    def __init__(self, gate_up_EOI: Tensor, down_EIF: Tensor) -> None:
        self._gate_up = gate_up_EOI
        self._down = down_EIF

    def __call__(self, x_TI: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_experts, hidden, inner = self._down.shape
        num_pairs, num_active = experts_TK.numel(), experts_TK.shape[1]
        groups = Groups.of(experts_TK.flatten(), num_experts)
        gate_up_PO = x_TI.new_empty(num_pairs, 2 * inner)
        grouped_linear(x_TI, self._gate_up, groups, gate_up_PO, in_rows_P=groups.order_P // num_active)
        gated_PF = x_TI.new_empty(num_pairs, inner)
        silu_mul(gate_up_PO, gated_PF)
        # Zeros, because pairs whose expert another rank has are in no group.
        parts_PI = x_TI.new_zeros(num_pairs, hidden, dtype=torch.float32)
        weights_P = weights_TK.flatten().index_select(0, groups.order_P)
        grouped_linear(gated_PF, self._down, groups, parts_PI, out_rows_P=groups.order_P, scales_P=weights_P)
        return parts_PI.view(-1, num_active, hidden).sum(1).to(x_TI.dtype)
