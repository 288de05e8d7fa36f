"""Products of rows with the weight of their group, against plain torch and against one product a row."""

import pytest
import torch

from sgray.kernels.grouped_linear import kernel, reference
from sgray.kernels.grouped_linear.groups import Groups, rows_of_a_block, sort_by_group

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
SIZES = [  # rows, groups, outputs, inputs
    (1, 4, 16, 16),
    (7, 3, 40, 24),
    (70, 4, 33, 130),
    (200, 2, 72, 64),
]


def some_groups(num_rows: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """Some of no group, on either side."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(-1, num_groups + 1, (num_rows,), generator=generator).to(device)


@pytest.mark.parametrize("num_rows, num_groups", [(1, 1), (1, 8), (5, 2), (64, 8), (300, 3), (129, 128)])
def test_every_row_of_a_group_is_in_one_block_of_that_group(num_rows: int, num_groups: int) -> None:
    groups_P = some_groups(num_rows, num_groups, torch.device("cpu"))
    groups = Groups.of(groups_P, num_groups)
    seen: list[int] = []
    for group, first, last in groups.blocks_3B.T.tolist():
        rows = groups.order_P[first : min(first + groups.block_rows, last)].tolist()
        assert all(groups_P[row] == group for row in rows)
        seen += rows
    assert sorted(seen) == [row for row, group in enumerate(groups_P.tolist()) if 0 <= group < num_groups]
    assert rows_of_a_block(num_rows, num_groups) == groups.block_rows


def test_rows_of_a_group_keep_their_order() -> None:
    order_P, starts = sort_by_group(torch.tensor([2, 0, 5, 0, 2, -1]), 3)
    assert order_P.tolist() == [5, 1, 3, 0, 4, 2]
    assert starts.tolist() == [1, 3, 3, 5]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_rows, num_groups, outputs, inputs", SIZES)
def test_the_kernel_multiplies_as_one_product_a_row_does(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_groups: int, outputs: int, inputs: int
) -> None:
    torch.manual_seed(inputs)
    x_RI = torch.randn(num_rows, inputs, device=device).to(dtype)
    weight_EOI = (torch.randn(num_groups, outputs, inputs, device=device) / inputs**0.5).to(dtype)
    groups_P = some_groups(num_rows, num_groups, device)
    groups = Groups.of(groups_P, num_groups)
    scales_P = torch.rand(num_rows, device=device)
    expected = torch.full((num_rows, outputs), 7.0, device=device)
    for row, group in enumerate(groups_P.tolist()):
        if 0 <= group < num_groups:
            expected[row] = weight_EOI[group].float() @ x_RI[row].float() * scales_P[row]
    for place in (kernel, reference):
        out_SO = torch.full((num_rows, outputs), 7.0, device=device).to(dtype)
        order_P = groups.order_P
        rows = {"in_rows_P": order_P, "out_rows_P": order_P, "scales_P": scales_P[order_P]}
        place.grouped_linear(x_RI, weight_EOI, groups, out_SO, **rows)
        torch.testing.assert_close(out_SO.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_in_the_order_of_their_groups_need_no_numbers_and_nan_stays_in_its_row(device: torch.device) -> None:
    torch.manual_seed(0)
    groups = Groups.of(torch.tensor([0, 0, 1, 1, 1], device=device), 2)
    x_RI, weight_EOI = torch.randn(5, 16, device=device), torch.randn(2, 8, 16, device=device)
    x_RI[3] = torch.nan
    wide = torch.full((5, 12), 3.0, device=device)
    wanted_SO = torch.empty(5, 8, device=device)
    kernel.grouped_linear(x_RI, weight_EOI, groups, wide[:, :8])
    reference.grouped_linear(x_RI, weight_EOI, groups, wanted_SO)
    torch.testing.assert_close(wide[:, :8], wanted_SO, equal_nan=True, atol=2e-5, rtol=2e-5)
    assert wide[:, :8].isnan().any(dim=1).tolist() == [False, False, False, True, False]
    assert (wide[:, 8:] == 3.0).all()
