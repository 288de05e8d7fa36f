"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467), over the hidden size or over each head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.layers.linear import Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.parallel.mesh import Whole


class RMSNorm:
    """x / rms(x) * weight over the last dimension; takes and computes float32, gives the computing type."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self._weight = Parameter([Piece((size,), Whole())], placement.mesh, torch.float32, placement.device)
        self.eps = eps
        self._dtype = placement.dtype
        self._root = size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5, device=placement.device)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self._weight

    @property
    def weight(self) -> Tensor:
        """The filled vector, float32."""
        return self._weight.data

    def __call__(self, x: Tensor) -> Tensor:
        return self.exact(x).to(self._dtype)

    def exact(self, x: Tensor) -> Tensor:
        """The same without rounding to the computing type.

        By the vector's length: sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size). On CPU these few
        operators take half the time of torch's own norm, which is put together of twice as many.
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return (x / length).mul_(self._weight.data * self._root)


class QueryKeyNorm:
    """Each query head and each key head normalised for itself, with one weight for all query and one for all key heads.

    Both are done together: rows of shape (T, query heads + key heads, D).
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, placement: Placement) -> None:
        self._query = RMSNorm(head_dim, eps, placement)
        self._key = RMSNorm(head_dim, eps, placement)
        self._counts = (num_heads, num_kv_heads)
        self._shape = (head_dim,)
        self._eps = eps
        self._weight_HD: Tensor | None = None

    @property
    def query(self) -> RMSNorm:
        """The norm of query heads."""
        return self._query

    @property
    def key(self) -> RMSNorm:
        """The norm of key heads."""
        return self._key

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        for part, norm in (("query", self._query), ("key", self._key)):
            for name, parameter in norm.parameters():
                yield f"{part}.{name}", parameter

    def finish(self) -> None:
        """Call once, when both weights are filled."""
        weights = [parameter.data for _, parameter in self.parameters()]
        rows = [weight.expand(count, -1) for weight, count in zip(weights, self._counts, strict=True)]
        self._weight_HD = torch.cat(rows)

    def __call__(self, x_THD: Tensor) -> Tensor:
        assert self._weight_HD is not None, "finish() comes first"
        return (F.rms_norm(x_THD.float(), self._shape, None, self._eps) * self._weight_HD).to(x_THD.dtype)
