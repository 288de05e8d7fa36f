"""Token ids to vectors. Ranks share the vocabulary: each holds the rows of some ids."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from sgray.layers.linear import Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.parallel.mesh import Spread


class Embedding:
    """One row of `weight` (vocabulary, hidden) a token, of which this rank holds those of its ids."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        rule = Spread()
        self._weight = Parameter(
            [Piece((vocab_size, hidden_size), rule)], placement.mesh, placement.dtype, placement.device
        )
        self._first, self._end = rule.part(placement.mesh, vocab_size)
        self._comm = placement.comm
        self._is_shared = placement.mesh.tp_size > 1

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self._weight

    @property
    def weight(self) -> Tensor:
        """The filled matrix; this rank's rows of it."""
        return self._weight.data

    def __call__(self, tokens_T: Tensor) -> Tensor:
        if not self._is_shared:
            return F.embedding(tokens_T, self._weight.data)
        # Every id is some rank's; what the others add is zero, so that the sum is its row to the bit.
        is_other_T = (tokens_T < self._first) | (tokens_T >= self._end)
        x_TI = F.embedding((tokens_T - self._first).masked_fill_(is_other_T, 0), self._weight.data)
        return self._comm.all_reduce(x_TI.masked_fill_(is_other_T[:, None], 0)).to(x_TI.dtype)
