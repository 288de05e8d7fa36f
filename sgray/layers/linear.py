"""The linear layer: what it computes is a quantisation method's matter, what it holds a shard rule's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sgray.layers.parameter import Parameter, Piece
from sgray.parallel.comm import Comm, SingleRank
from sgray.parallel.mesh import Mesh, ShardRule, Whole

LinearOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a layer's tensors live: this rank, the computing type, the device, and the way to the other ranks."""

    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    comm: Comm = field(default_factory=SingleRank)


@dataclass(frozen=True, slots=True)
class Output:
    """One of the matrices that a linear layer computes together: its output features and how they are cut."""

    features: int
    rule: ShardRule


class LinearMethod(Protocol):
    """How the weights of a linear layer are stored and multiplied."""

    def parameters(
        self, weights: Sequence[Piece], biases: Sequence[Piece], placement: Placement
    ) -> dict[str, Parameter]:
        """What the checkpoint must fill, by the last part of its name."""
        ...

    def build(self, parameters: dict[str, Parameter]) -> LinearOp:
        """The finished operation on rows of shape (T, inputs); `parameters` may be given up afterwards."""
        ...


class Linear:
    """y = x W^T + b for several outputs at once (fused projections), of which this rank holds its part.

    `input_rule` cuts the inputs instead: then there is one whole output, and a call gives the sum of the ranks'
    results, while `op` gives this rank's alone.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[Output],
        placement: Placement,
        method: LinearMethod,
        *,
        bias: bool = False,
        input_rule: ShardRule | None = None,
    ) -> None:
        weights = [Piece((output.features, in_features), input_rule or output.rule) for output in outputs]
        biases = [Piece((output.features,), Whole() if input_rule else output.rule) for output in outputs]
        self._method = method
        self._parameters = method.parameters(weights, biases if bias else (), placement)
        self._op: LinearOp | None = None
        self._mesh = placement.mesh
        self._comm = placement.comm
        self._is_summed = input_rule is not None and placement.mesh.tp_size > 1

    @property
    def is_summed(self) -> bool:
        """Whether other ranks have a part in the result."""
        return self._is_summed

    @property
    def comm(self) -> Comm:
        """The way to those ranks."""
        return self._comm

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """What the checkpoint must fill."""
        yield from self._parameters.items()

    def finish(self) -> None:
        """Call once, when every parameter is filled; gives up the tensors that the operation does not need."""
        if self._is_summed and self._mesh.tp_rank > 0 and "bias" in self._parameters:
            self._parameters["bias"].data.zero_()  # the first rank's is in the sum
        self._op = self._method.build(self._parameters)
        self._parameters = {}

    @property
    def op(self) -> LinearOp:
        """The finished operation."""
        assert self._op is not None, "finish() comes first"
        return self._op

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = self.op(x_TI)
        return self._comm.all_reduce(y_TO) if self._is_summed else y_TO
