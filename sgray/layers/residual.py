"""The sum that runs through all layers, and the steps by which layers read it and add to it.

A decoder layer is written in these steps, so that a device may fuse what stands between two matrix products. The sum is
float32 whatever the computing type: rounded after each layer, it makes half of the error of a bfloat16 model.

Shape letters: T tokens, I hidden size, O outputs, F inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from sgray.layers.head import OutputHead
from sgray.layers.linear import Linear
from sgray.layers.norm import RMSNorm


class Residual(Protocol):
    """The running sum of one step's tokens. Methods that take a linear layer compute with what is summed up so far."""

    def project(self, norm: RMSNorm, linear: Linear) -> Tensor:
        """linear(norm(sum)), (T, O)."""
        ...

    def gate(self, norm: RMSNorm, linear: Linear) -> Tensor:
        """silu(gate) * up, (T, F), where gate and up are the halves of linear(norm(sum))."""
        ...

    def add(self, linear: Linear, x: Tensor) -> None:
        """sum += linear(x)."""
        ...

    def feed(self, norm: RMSNorm, block: Callable[[Tensor], Tensor]) -> None:
        """sum += block(norm(sum)), where the block is (T, I) to (T, I) and ends with what all ranks add."""
        ...

    def take(self, rows: Tensor | slice) -> Residual:
        """The sum of some rows alone."""
        ...

    def value(self) -> Tensor:
        """The sum itself, (T, I), float32."""
        ...

    def scores(self, norm: RMSNorm, head: OutputHead, room_TV: Tensor | None = None) -> Tensor:
        """The head's float32 scores over the vocabulary, (T, V); in `room_TV` if that is given and of use."""
        ...


MakeResidual = Callable[[Tensor], Residual]
"""A residual that begins with the embeddings (T, I)."""


class TorchResidual:
    """The steps one after the other in plain torch, on any device."""

    def __init__(self, x_TI: Tensor) -> None:
        self._x = x_TI.float()

    def project(self, norm: RMSNorm, linear: Linear) -> Tensor:
        return linear(norm(self._x))

    def gate(self, norm: RMSNorm, linear: Linear) -> Tensor:
        gate, up = self.project(norm, linear).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add(self, linear: Linear, x: Tensor) -> None:
        self._x.add_(linear(x))

    def feed(self, norm: RMSNorm, block: Callable[[Tensor], Tensor]) -> None:
        self._x.add_(block(norm(self._x)))

    def take(self, rows: Tensor | slice) -> TorchResidual:
        return TorchResidual(self._x[rows])

    def value(self) -> Tensor:
        return self._x

    def scores(self, norm: RMSNorm, head: OutputHead, room_TV: Tensor | None = None) -> Tensor:
        return head(norm.exact(self._x))
