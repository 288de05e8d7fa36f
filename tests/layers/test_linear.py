"""The linear layer: fused outputs, shards, packed weights."""

from __future__ import annotations

import pytest
import torch

from sgray.errors import ModelLoadError
from sgray.layers.linear import Linear, Output, Placement
from sgray.layers.parameter import Parameter, Piece
from sgray.layers.quant.unquantized import Unquantized, matrix_product
from sgray.parallel.mesh import Member, Mesh, Split, Whole

CPU = torch.device("cpu")
ONE_RANK = Mesh()


def placement(mesh: Mesh = ONE_RANK, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(mesh, dtype, CPU)


def fill(linear: Linear, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
    for name, parameter in linear.parameters():
        for index, value in enumerate(weights if name == "weight" else biases):
            parameter.fill(index, value)
    linear.finish()


@pytest.mark.parametrize("num_rows", [1, 2, 17, 123])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_torch(num_rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(33, 50).to(dtype), torch.randn(33).to(dtype), torch.randn(num_rows, 50).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for given, reference in ((bias, expected), (None, expected - bias.double())):
        with torch.inference_mode():
            ours = matrix_product(weight, given)(x)
        assert ours.dtype == dtype
        # One rounding of the result and the float32 sum of 50 products.
        torch.testing.assert_close(
            ours.double(), reference, rtol=2 * torch.finfo(dtype).eps, atol=60 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [576, 1536])
def test_a_row_gives_the_same_in_every_company(dtype: torch.dtype, in_features: int) -> None:
    product = matrix_product(torch.randn(576, in_features).to(dtype))
    x = torch.randn(200, in_features).to(dtype)
    with torch.inference_mode():
        alone = product(x[:1])
        for num_rows in (2, 3, 8, 33, 200):
            assert torch.equal(product(x[:num_rows])[:1], alone)


def test_fused_outputs_lie_side_by_side() -> None:
    linear = Linear(6, [Output(4, Whole()), Output(2, Whole())], placement(), Unquantized(), bias=True)
    weights, biases = [torch.randn(4, 6), torch.randn(2, 6)], [torch.randn(4), torch.randn(2)]
    fill(linear, weights, biases)
    x = torch.randn(3, 6)
    expected = torch.cat([x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)], dim=1)
    torch.testing.assert_close(linear(x), expected)


def test_ranks_hold_their_parts_of_every_output() -> None:
    weights = [torch.randn(6, 5), torch.randn(4, 5)]
    x = torch.randn(2, 5)
    parts = []
    for rank in range(2):
        outputs = [Output(6, Split(6, "heads")), Output(4, Split(2, "heads"))]
        linear = Linear(5, outputs, placement(Mesh(rank, 2)), Unquantized())
        fill(linear, weights, [])
        parts.append(linear(x).split([3, 2], dim=1))
    for weight, halves in zip(weights, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(halves, dim=1), x @ weight.T)


def test_ranks_that_cut_the_inputs_add_up() -> None:
    weight, x = torch.randn(4, 6), torch.randn(2, 6)
    total = torch.zeros(2, 4)
    for rank in range(3):
        rule = Split(6, "columns").of_inputs()
        linear = Linear(6, [Output(4, Whole())], placement(Mesh(rank, 3)), Unquantized(), input_rule=rule)
        fill(linear, [weight], [])
        total += linear(x[:, 2 * rank : 2 * rank + 2])
    torch.testing.assert_close(total, x @ weight.T)


def test_a_parameter_knows_what_it_lacks() -> None:
    parameter = Parameter([Piece((2, 3), Whole()), Piece((1, 3), Whole())], Mesh(), torch.float32, CPU)
    parameter.fill(1, torch.ones(1, 3))
    assert parameter.missing() == [0]
    parameter.fill(0, torch.zeros(2, 3))
    assert parameter.missing() == []
    assert parameter.data.tolist() == [[0] * 3, [0] * 3, [1] * 3]


class InAFile:
    """A tensor of which nothing may be read."""

    def get_shape(self) -> list[int]:
        return [2, 3]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        raise AssertionError(f"read: {index}")


def test_of_a_piece_that_another_rank_holds_nothing_is_read() -> None:
    experts = Split(2, "experts")
    pieces = [Piece((2, 3), Member(experts, index)) for index in range(2)]
    parameter = Parameter(pieces, Mesh(1, 2), torch.float32, CPU)
    parameter.fill(0, InAFile())
    assert parameter.missing() == [1]
    parameter.fill(1, torch.ones(2, 3))
    assert parameter.data.tolist() == [[1] * 3] * 2
    with pytest.raises(ModelLoadError, match="twice"):
        parameter.fill(0, InAFile())


def test_a_piece_is_not_filled_twice() -> None:
    parameter = Parameter([Piece((2,), Whole())], Mesh(), torch.float32, CPU)
    parameter.fill(0, torch.ones(2))
    with pytest.raises(ModelLoadError, match="twice"):
        parameter.fill(0, torch.ones(2))


@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 3, 1), (1, 3)])
def test_a_wrong_shape_is_refused_with_both(shape: tuple[int, ...]) -> None:
    parameter = Parameter([Piece((2, 3), Whole())], Mesh(), torch.float32, CPU)
    with pytest.raises(ModelLoadError, match=r"instead of \[2, 3\]"):
        parameter.fill(0, torch.ones(shape))
