"""Token ids to vectors, and vectors to scores over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from sgray.layers.linear import Linear, LinearMethod, LinearOp, Output, Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.layers.quant.unquantized import matrix_product
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


class TiedHead:
    """Scores by the embedding matrix itself; has nothing of its own in the checkpoint."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self._op: LinearOp | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from ()

    def finish(self) -> None:
        """Call once, when the embedding is filled."""
        self._op = matrix_product(self._embedding.weight)

    def __call__(self, x_TI: Tensor) -> Tensor:
        assert self._op is not None, "finish() comes first"
        return self._op(x_TI)


def output_head(
    embedding: Embedding, vocab_size: int, hidden_size: int, placement: Placement, method: LinearMethod, *, tied: bool
) -> TiedHead | Linear:
    """The layer from hidden states to logits: the embedding again, or a matrix of its own."""
    if tied:
        return TiedHead(embedding)
    return Linear(hidden_size, [Output(vocab_size, Whole())], placement, method)
