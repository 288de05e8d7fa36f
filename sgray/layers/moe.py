"""The mixture of experts: a router gives every token to a few gated blocks, whose results are added by weight.

Ranks hold whole experts or a part of each. Every rank has every token and routes it alike, computes what its experts
add to it, and one sum over the ranks ends the block, as it does without experts. Sending tokens to the ranks that hold
their experts instead (all to all) would pay where ranks hold different tokens, which is attention by data parallel
ranks; here replicas do that.

Shape letters: T tokens, K experts a token, E experts, I hidden size, F inner size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.layers.experts import ExpertsOp, MakeExperts
from sgray.layers.linear import Linear, LinearMethod, LinearOp, Output, Placement
from sgray.layers.mlp import GatedMLP
from sgray.layers.norm import RMSNorm
from sgray.layers.parameter import Parameter, Piece
from sgray.layers.quant.unquantized import matrix_product
from sgray.layers.residual import Residual
from sgray.layers.sparsity import Sparsity
from sgray.parallel.mesh import Whole


class Router:
    """Which experts a token goes through and with what weights: the best of a softmax over all of them.

    In float32 whatever the computing type: a rounded score could choose another expert.
    """

    def __init__(self, hidden_size: int, sparsity: Sparsity, placement: Placement) -> None:
        piece = Piece((sparsity.num_experts, hidden_size), Whole())
        self._weight = Parameter([piece], placement.mesh, torch.float32, placement.device)
        self._num_active = sparsity.num_active
        self._is_renormalized = sparsity.is_renormalized
        self._product: LinearOp | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """What the checkpoint must fill."""
        yield "weight", self._weight

    def finish(self) -> None:
        """Call once, when the weight is filled."""
        self._product = matrix_product(self._weight.data)

    def __call__(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and weights of each token's experts, the best first, (T, K) both."""
        assert self._product is not None, "finish() comes first"
        weights_TK, experts_TK = self._product(x_TI.float()).softmax(dim=-1).topk(self._num_active, dim=-1)
        if self._is_renormalized:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return experts_TK, weights_TK


class Experts:
    """The weights of this rank's experts, or of its part of every expert, each kind in one tensor."""

    def __init__(self, hidden_size: int, sparsity: Sparsity, placement: Placement, make: MakeExperts) -> None:
        inner = sparsity.inner_size
        rules = [sparsity.rules_of(expert) for expert in range(sparsity.num_experts)]
        self._gate_up = _stacked([Piece((inner, hidden_size), rule) for rule, _ in rules for _ in range(2)], placement)
        self._down = _stacked([Piece((hidden_size, inner), rule) for _, rule in rules], placement)
        first, last = 0, sparsity.num_experts
        if sparsity.has_whole_experts:
            first, last = sparsity.experts.part(placement.mesh, last)
        self._first, self._num_held = first, last - first
        self._make = make
        self._op: ExpertsOp | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """What the checkpoint must fill."""
        if self._op is None:
            yield "gate_up.weight", self._gate_up
            yield "down.weight", self._down

    def finish(self) -> None:
        """Call once, when both are filled; gives up the tensors that the operation does not need."""
        gate_up, down = (weight.data.unflatten(0, (self._num_held, -1)) for weight in (self._gate_up, self._down))
        self._op = self._make(gate_up, down)
        del self._gate_up, self._down

    def __call__(self, x_TI: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """This rank's part of the sum over each token's experts."""
        assert self._op is not None, "finish() comes first"
        return self._op(x_TI, experts_TK - self._first, weights_TK)


class SparseMLP:
    """A router, its experts and, where the model has one, the expert that every token goes through."""

    def __init__(
        self, hidden_size: int, sparsity: Sparsity, placement: Placement, method: LinearMethod, make: MakeExperts
    ) -> None:
        self.router = Router(hidden_size, sparsity, placement)
        self.experts = Experts(hidden_size, sparsity, placement, make)
        self.shared: GatedMLP | None = None
        if sparsity.shared_size is not None and sparsity.shared_columns is not None:
            self.shared = GatedMLP(hidden_size, sparsity.shared_size, sparsity.shared_columns, placement, method)
            self.shared_gate = Linear(hidden_size, [Output(1, Whole())], placement, method)
        self._comm = placement.comm
        self._is_summed = placement.mesh.tp_size > 1

    def parts(self) -> Iterator[tuple[str, Router | Experts | Linear]]:
        """Everything with parameters, by name."""
        yield "router", self.router
        yield "experts", self.experts
        if self.shared is not None:
            for name, part in self.shared.parts():
                yield f"shared.{name}", part
            yield "shared_gate", self.shared_gate

    def add_to(self, x: Residual, norm: RMSNorm) -> None:
        """sum += block(norm(sum))."""
        x.feed(norm, self)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The block's result, (T, I), of all ranks."""
        y_TI = self.experts(x_TI, *self.router(x_TI))
        if self.shared is not None:
            gate, up = self.shared.gate_up.op(x_TI).chunk(2, dim=-1)
            shared_TI = self.shared.down.op(F.silu(gate).mul_(up))
            y_TI = y_TI + torch.sigmoid(self.shared_gate(x_TI)) * shared_TI
        return self._comm.all_reduce(y_TI) if self._is_summed else y_TI


def _stacked(pieces: list[Piece], placement: Placement) -> Parameter:
    return Parameter(pieces, placement.mesh, placement.dtype, placement.device)
