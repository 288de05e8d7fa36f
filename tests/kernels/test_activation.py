"""The gate of the MLP, against plain torch and against float64."""

import pytest
import torch

from sgray.kernels.activation import kernel, reference

ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}  # one step of the output


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("rows", "inner"), [(1, 16), (3, 1536), (5, 37), (2, 2048), (2, 6144)])
def test_the_kernel_gates_as_the_reference_does(
    device: torch.device, rows: int, inner: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(inner)
    gate_up_TF = (torch.randn(rows, 2 * inner, device=device) * 4).to(dtype)
    out_TF, wanted_TF = (torch.full((rows, inner), torch.nan, dtype=dtype, device=device) for _ in range(2))
    kernel.silu_mul(gate_up_TF, out_TF)
    reference.silu_mul(gate_up_TF, wanted_TF)
    torch.testing.assert_close(out_TF, wanted_TF, rtol=ROUNDING[dtype], atol=1e-7)


def test_the_reference_is_the_formula() -> None:
    torch.manual_seed(1)
    gate_up_TF = torch.randn(4, 30)
    gate_TF, up_TF = gate_up_TF[:, :15].double(), gate_up_TF[:, 15:].double()
    out_TF = torch.full((4, 15), torch.nan)
    reference.silu_mul(gate_up_TF, out_TF)
    torch.testing.assert_close(out_TF.double(), gate_TF / (1 + (-gate_TF).exp()) * up_TF, rtol=2e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # infinity is right: the gate is divided by it
def test_extreme_gates_neither_overflow_nor_turn_into_nan(device: torch.device) -> None:
    gate_up_TF = torch.tensor([[-1e4, 1e4, -80.0, 0.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    out_TF = torch.full((1, 4), torch.nan, device=device)
    kernel.silu_mul(gate_up_TF, out_TF)
    torch.testing.assert_close(out_TF, torch.tensor([[0.0, 2e4, 0.0, 0.0]], device=device), atol=1e-30, rtol=1e-6)


def test_a_row_of_nan_spoils_no_other_row_and_no_memory_between_rows_is_touched(device: torch.device) -> None:
    gate_up_TF = torch.randn(3, 2 * 40, device=device)
    gate_up_TF[1] = torch.nan
    wide = torch.full((3, 64), torch.nan, device=device)
    wanted_TF = torch.empty(3, 40, device=device)
    kernel.silu_mul(gate_up_TF, wide[:, :40])
    reference.silu_mul(gate_up_TF, wanted_TF)
    torch.testing.assert_close(wide[:, :40], wanted_TF, equal_nan=True, rtol=2e-6, atol=1e-7)
    assert not wide[0, :40].isnan().any()
    assert wide[:, 40:].isnan().all()
