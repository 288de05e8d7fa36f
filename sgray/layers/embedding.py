"""Token ids to vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from sgray.layers.linear import Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.parallel.mesh import Whole


class Embedding:
    """One row of `weight` (vocabulary, hidden) a token."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        piece = Piece((vocab_size, hidden_size), Whole())
        self._weight = Parameter([piece], placement.mesh, placement.dtype, placement.device)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self._weight

    @property
    def weight(self) -> Tensor:
        """The filled matrix."""
        return self._weight.data

    def __call__(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self._weight.data)
