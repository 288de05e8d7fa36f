"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sgray.layers.linear import Linear, LinearMethod, Output, Placement
from sgray.parallel.mesh import Split, Whole


class GatedMLP:
    """The rule `columns` cuts the inner dimension between ranks."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        columns: Split,
        placement: Placement,
        method: LinearMethod,
        *,
        bias: bool = False,
    ) -> None:
        inner, outer = Output(inner_size, columns), Output(hidden_size, Whole())
        self.gate_up = Linear(hidden_size, [inner, inner], placement, method, bias=bias)
        self.down = Linear(inner_size, [outer], placement, method, bias=bias, input_rule=columns.of_inputs())

    def __call__(self, x_TI: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TI).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))
