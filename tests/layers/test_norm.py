"""Normalisation against its definition."""

from __future__ import annotations

import pytest
import torch

from sgray.layers.linear import Placement
from sgray.layers.norm import QueryKeyNorm, RMSNorm
from sgray.parallel.mesh import Mesh

PLACEMENT = Placement(Mesh(), torch.float32, torch.device("cpu"))


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("size", [1, 17, 576])
def test_rms_norm(size: int, eps: float) -> None:
    norm, weight = RMSNorm(size, eps, PLACEMENT), torch.randn(size)
    for _, parameter in norm.parameters():
        parameter.fill(0, weight)
    x = torch.randn(5, size)
    torch.testing.assert_close(norm(x), reference(x, weight, eps))


def test_query_and_key_heads_have_weights_of_their_own() -> None:
    norm, weights = (
        QueryKeyNorm(4, 2, 8, 1e-6, PLACEMENT),
        {"query.weight": torch.randn(8), "key.weight": torch.randn(8)},
    )
    for name, parameter in norm.parameters():
        parameter.fill(0, weights[name])
    norm.finish()
    x = torch.randn(3, 6, 8)
    ours = norm(x)
    torch.testing.assert_close(ours[:, :4], reference(x[:, :4], weights["query.weight"], 1e-6))
    torch.testing.assert_close(ours[:, 4:], reference(x[:, 4:], weights["key.weight"], 1e-6))
