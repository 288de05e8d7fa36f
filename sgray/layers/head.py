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
from sgray.layers.quant.unquantized import matrix_product
from sgray.parallel.mesh import Whole

# Scores this close to the best, relative to it, may be out of order: four times what bfloat16 rounds by.
CLOSE = 2.0**-6
# More close scores a row than this are no near-ties but a flat distribution, where order means nothing.
MOST_CLOSE = 64


class OutputHead:
    """Scores by a matrix of its own, or by the embedding's where the two are tied."""

    def __init__(
        self, embedding: Embedding, vocab_size: int, hidden_size: int, placement: Placement, *, tied: bool
    ) -> None:
        self._embedding = embedding
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
        self._product = matrix_product(weight)
        self._rows_VI = None if weight.dtype == torch.float32 else weight
        self._own = None

    def __call__(self, x_RI: Tensor) -> Tensor:
        """Float32 scores (R, V) for float32 hidden states."""
        assert self._product is not None, "finish() comes first"
        if self._rows_VI is None:
            return self._product(x_RI)
        rounded = self._product(x_RI.to(self._rows_VI.dtype))
        return _sharpen(rounded, x_RI, self._rows_VI)


def _sharpen(rounded_RV: Tensor, x_RI: Tensor, weight_VI: Tensor) -> Tensor:
    """The scores in float32, those close to a row's best computed anew."""
    best = rounded_RV.amax(dim=-1, keepdim=True)
    rows, ids = (rounded_RV >= best - CLOSE * best.abs()).nonzero(as_tuple=True)
    scores_RV = rounded_RV.float()
    if len(ids) <= MOST_CLOSE * len(rounded_RV):
        scores_RV[rows, ids] = (weight_VI[ids].float() * x_RI[rows]).sum(dim=-1)
    return scores_RV
