"""The output head: hidden states to scores over the vocabulary, exact among the best.

A product in bfloat16 rounds a score of 16 to 32 to the nearest eighth: enough to make ties where there are none, and a
greedy answer that depends on them. So the scores that rounding could have put in the wrong order are computed again in
float32, which costs a few rows of the matrix instead of all of it.

Shape letters: R rows, I hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sgray.layers.embedding import Embedding
from sgray.layers.linear import LinearOp, Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.layers.quant.unquantized import MakeProduct, matrix_product
from sgray.parallel.mesh import Whole

# So many of a row's best scores are exact. Rounding moves a score by one part in 512, so few can have changed places.
NUM_EXACT = 8


class OutputHead:
    """Scores by a matrix of its own, or by the embedding's where the two are tied."""

    def __init__(
        self,
        embedding: Embedding,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        make_product: MakeProduct = matrix_product,
        *,
        tied: bool,
    ) -> None:
        self._embedding = embedding
        self._make_product = make_product
        self._own: Parameter | None = None
        if not tied:
            piece = Piece((vocab_size, hidden_size), Whole())
            self._own = Parameter([piece], placement.mesh, placement.dtype, placement.device)
        self._product: LinearOp | None = None
        self._rows_VI: Tensor | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The matrix, if it has one."""
        if self._own is not None:
            yield "weight", self._own

    def finish(self) -> None:
        """Call once, when every parameter is filled."""
        weight = self._embedding.weight if self._own is None else self._own.data
        self._product = self._make_product(weight, None)
        self._rows_VI = None if weight.dtype == torch.float32 else weight
        self._own = None

    @property
    def product(self) -> LinearOp:
        """The product with the matrix."""
        assert self._product is not None, "finish() comes first"
        return self._product

    def __call__(self, x_RI: Tensor) -> Tensor:
        """Float32 scores (R, V) for float32 hidden states."""
        if self._rows_VI is None:
            return self.product(x_RI)
        rounded = self.product(x_RI.to(self._rows_VI.dtype))
        return _sharpen(rounded, x_RI, self._rows_VI)


def _sharpen(rounded_RV: Tensor, x_RI: Tensor, weight_VI: Tensor) -> Tensor:
    """The scores in float32, the best of each row computed anew."""
    best_RB = rounded_RV.topk(min(NUM_EXACT, rounded_RV.shape[-1]), dim=-1, sorted=False).indices
    exact_RB = (weight_VI[best_RB].float() * x_RI[:, None]).sum(dim=-1)
    return rounded_RV.float().scatter_(1, best_RB, exact_RB)
