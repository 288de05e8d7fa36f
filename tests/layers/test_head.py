"""The output head against the product in float64."""

from __future__ import annotations

import torch

from sgray.layers.embedding import Embedding
from sgray.layers.head import OutputHead
from sgray.layers.linear import Placement
from sgray.parallel.mesh import Mesh

HIDDEN, VOCAB = 64, 513


def make_head(dtype: torch.dtype, weight: torch.Tensor, *, tied: bool) -> OutputHead:
    placement = Placement(Mesh(), dtype, torch.device("cpu"))
    embedding = Embedding(*weight.shape, placement)
    head = OutputHead(embedding, *weight.shape, placement, tied=tied)
    for _, parameter in [*embedding.parameters(), *head.parameters()]:
        parameter.fill(0, weight)
    head.finish()
    return head


def test_scores_near_the_best_are_exact_in_bfloat16() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(VOCAB, HIDDEN).bfloat16(), 5 * torch.randn(33, HIDDEN)
    exact = x.double() @ weight.double().T
    for tied in (True, False):
        scores = make_head(torch.bfloat16, weight, tied=tied)(x)
        assert scores.dtype == torch.float32
        assert torch.equal(scores.argmax(-1), exact.argmax(-1))
        best = exact.amax(-1, keepdim=True)
        near = exact >= best * (1 - 2**-7)
        assert near.sum() > len(x)  # some rows have more than one
        torch.testing.assert_close(scores.double()[near], exact[near], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(scores.double(), exact, rtol=0.02, atol=0.5)


def test_rounding_alone_would_have_changed_the_best() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(VOCAB, HIDDEN).bfloat16(), 5 * torch.randn(333, HIDDEN)
    rounded = (x.bfloat16() @ weight.T).argmax(-1)
    assert not torch.equal(rounded, make_head(torch.bfloat16, weight, tied=True)(x).argmax(-1))


def test_a_flat_distribution_stays_flat() -> None:
    weight = torch.ones(VOCAB, HIDDEN).bfloat16()
    scores = make_head(torch.bfloat16, weight, tied=True)(torch.ones(2, HIDDEN))
    assert torch.equal(scores, torch.full((2, VOCAB), float(HIDDEN)))


def test_a_broken_row_harms_no_other() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(VOCAB, HIDDEN).bfloat16(), torch.randn(3, HIDDEN)
    head = make_head(torch.bfloat16, weight, tied=True)
    alone = head(x[2:])
    x[0] = float("nan")
    x[1] = float("inf")
    assert torch.equal(head(x)[2:], alone)


def test_float32_scores_are_the_product() -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(VOCAB, HIDDEN), torch.randn(7, HIDDEN)
    torch.testing.assert_close(make_head(torch.float32, weight, tied=False)(x), x @ weight.T)
