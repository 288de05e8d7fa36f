"""The output head: hidden states to scores over the vocabulary, exact among the best.

A product in bfloat16 rounds a score of 16 to 32 to the nearest eighth: enough to make ties where there are none, and a
greedy answer that depends on them. So the scores that rounding could have put in the wrong order are computed again in
float32, which costs a few rows of the matrix instead of all of it.

Ranks share the vocabulary as they do in the embedding; each ends with the scores of all of it.

Shape letters: R rows, I hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.layers.embedding import Embedding
from sgray.layers.linear import LinearOp, Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.layers.quant.unquantized import MakeProduct, matrix_product
from sgray.parallel.mesh import Spread

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
        rule = Spread()
        if not tied:
            piece = Piece((vocab_size, hidden_size), rule)
            self._own = Parameter([piece], placement.mesh, placement.dtype, placement.device)
        self._product: LinearOp | None = None
        self._rows_VI: Tensor | None = None
        self._comm = placement.comm
        self._vocab_size = vocab_size
        self._share = rule.share(placement.mesh, vocab_size)

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
        """The product with this rank's rows of the matrix."""
        assert self._product is not None, "finish() comes first"
        return self._product

    def __call__(self, x_RI: Tensor) -> Tensor:
        """Float32 scores (R, V) for float32 hidden states."""
        if self._rows_VI is None:
            return self.gather(self.product(x_RI))
        rounded = self.product(x_RI.to(self._rows_VI.dtype))
        return self.gather(_sharpen(rounded, x_RI, self._rows_VI))

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the rows of the whole vocabulary."""
        return self._share == self._vocab_size

    def gather(self, part_RV: Tensor) -> Tensor:
        """The scores of the whole vocabulary, from each rank's own."""
        if self.is_whole:
            return part_RV
        # Ranks hand in equally many, so the last ones add scores of ids that do not exist; these are cut off again.
        padded_RV = F.pad(part_RV, (0, self._share - part_RV.shape[-1]))
        return self._comm.all_gather(padded_RV)[:, : self._vocab_size].contiguous()


def _sharpen(rounded_RV: Tensor, x_RI: Tensor, weight_VI: Tensor) -> Tensor:
    """The scores in float32, the best of each row computed anew."""
    best_RB = rounded_RV.topk(min(NUM_EXACT, rounded_RV.shape[-1]), dim=-1, sorted=False).indices
    exact_RB = (weight_VI[best_RB].float() * x_RI[:, None]).sum(dim=-1)
    return rounded_RV.float().scatter_(1, best_RB, exact_RB)
