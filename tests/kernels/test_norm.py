"""The norm with its residual addition, against plain torch and against float64."""

import pytest
import torch
from torch import Tensor

from sgray.kernels.norm import kernel, reference

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}  # one step of the output


def case(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * inputs)
    residual_TI = torch.randn(rows, inputs, device=device) * 3
    delta_TI = torch.randn(rows, inputs, device=device).to(dtype)
    return residual_TI, delta_TI, torch.rand(inputs, device=device) + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (3, 576), (5, 37), (2, 5120), (2, 4096)])
def test_the_kernel_adds_and_norms_as_the_reference_does(
    device: torch.device, rows: int, inputs: int, dtype: torch.dtype
) -> None:
    residual_TI, delta_TI, weight_I = case(rows, inputs, dtype, device)
    wanted_residual_TI = residual_TI.clone()
    out_TI, wanted_TI = (torch.full((rows, inputs), torch.nan, dtype=dtype, device=device) for _ in range(2))
    kernel.add_rms_norm(residual_TI, delta_TI, weight_I, EPS, out_TI)
    reference.add_rms_norm(wanted_residual_TI, delta_TI, weight_I, EPS, wanted_TI)
    assert torch.equal(residual_TI, wanted_residual_TI)
    torch.testing.assert_close(out_TI, wanted_TI, rtol=ROUNDING[dtype], atol=1e-6)


def test_the_reference_is_the_formula() -> None:
    residual_TI, delta_TI, weight_I = case(4, 100, torch.bfloat16, torch.device("cpu"))
    sum_TI = residual_TI.double() + delta_TI.double()
    wanted_TI = sum_TI / (sum_TI.pow(2).sum(1, keepdim=True) / 100 + EPS).sqrt() * weight_I.double()
    out_TI = torch.full((4, 100), torch.nan)
    reference.add_rms_norm(residual_TI, delta_TI, weight_I, EPS, out_TI)
    torch.testing.assert_close(out_TI.double(), wanted_TI, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(residual_TI.double(), sum_TI, rtol=1e-6, atol=1e-6)


def test_without_a_delta_the_residual_is_only_read(device: torch.device) -> None:
    residual_TI, _, weight_I = case(3, 200, torch.bfloat16, device)
    before_TI = residual_TI.clone()
    out_TI, wanted_TI = (torch.full((3, 200), torch.nan, device=device) for _ in range(2))
    kernel.add_rms_norm(residual_TI, None, weight_I, EPS, out_TI)
    reference.add_rms_norm(before_TI, None, weight_I, EPS, wanted_TI)
    assert torch.equal(residual_TI, before_TI)
    torch.testing.assert_close(out_TI, wanted_TI, rtol=2e-6, atol=1e-6)


def test_a_row_of_nan_spoils_no_other_row_and_no_memory_between_rows_is_touched(device: torch.device) -> None:
    residual_TI, delta_TI, weight_I = case(3, 80, torch.bfloat16, device)
    residual_TI[1] = torch.nan
    pitched = torch.full((3, 96), torch.nan, dtype=torch.bfloat16, device=device)
    wide_delta = torch.full((3, 112), torch.nan, dtype=torch.bfloat16, device=device)
    wide_delta[:, :80] = delta_TI
    wanted_TI = torch.empty(3, 80, dtype=torch.bfloat16, device=device)
    reference.add_rms_norm(residual_TI.clone(), delta_TI, weight_I, EPS, wanted_TI)
    kernel.add_rms_norm(residual_TI, wide_delta[:, :80], weight_I, EPS, pitched[:, :80])
    for row in (0, 2):
        torch.testing.assert_close(pitched[row, :80], wanted_TI[row], rtol=2**-7, atol=1e-6)
    assert pitched[1].isnan().all()
    assert pitched[:, 80:].isnan().all()


def test_weights_may_be_in_the_computing_dtype(device: torch.device) -> None:
    residual_TI, delta_TI, weight_I = case(2, 64, torch.bfloat16, device)
    rounded_I = weight_I.to(torch.bfloat16)
    outs = [torch.full((2, 64), torch.nan, device=device) for _ in range(2)]
    kernel.add_rms_norm(residual_TI.clone(), delta_TI, rounded_I, EPS, outs[0])
    kernel.add_rms_norm(residual_TI.clone(), delta_TI, rounded_I.float(), EPS, outs[1])
    assert torch.equal(outs[0], outs[1])


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    out_TI = torch.full((1, 48), torch.nan, device=device)
    kernel.add_rms_norm(torch.zeros(1, 48, device=device), None, torch.ones(48, device=device), EPS, out_TI)
    assert torch.equal(out_TI, torch.zeros_like(out_TI))
