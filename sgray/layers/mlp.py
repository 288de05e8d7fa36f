"""The parameters of the gated feed-forward block, down(silu(gate(x)) * up(x)); one product gives gate and up."""

from __future__ import annotations

from collections.abc import Iterator

from sgray.layers.linear import Linear, LinearMethod, Output, Placement
from sgray.layers.norm import RMSNorm
from sgray.layers.residual import Residual
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

    def parts(self) -> Iterator[tuple[str, Linear]]:
        """Everything with parameters, by name."""
        yield "gate_up", self.gate_up
        yield "down", self.down

    def add_to(self, x: Residual, norm: RMSNorm) -> None:
        """sum += block(norm(sum))."""
        x.add(self.down, x.gate(norm, self.gate_up))
