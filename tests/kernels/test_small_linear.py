"""Products of few rows with a big weight: every form and every fusion against plain torch and against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from sgray.kernels.activation import kernel as activation
from sgray.kernels.small_linear import kernel, reference
from sgray.kernels.small_linear.forms import MAX_ROWS, RowForm, TileForm, choose
from sgray.kernels.small_linear.kernel import SmallWeight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}  # one step of the output


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def weight_of(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False
) -> SmallWeight:
    return SmallWeight.of(normal(outputs, inputs, dtype=dtype, device=device) / inputs**0.5, gated=gated)


def poisoned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rows, columns) of NaN inside a larger field of NaN, so that a store beyond an edge can be seen."""
    return torch.full((rows + 2, columns + 8), torch.nan, dtype=dtype, device=device)[1:-1, :columns]


def check_surroundings(out_TO: Tensor) -> None:
    field = out_TO._base
    assert field is not None
    assert field[[0, -1]].isnan().all() and field[:, out_TO.shape[1] :].isnan().all()


def check(out_TO: Tensor, wanted_TO: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(out_TO, wanted_TO, rtol=ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 64), (5, 576), (3, 37), (2, 4500), (1, 64)])
def test_one_row(device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x_1I = normal(1, inputs, dtype=dtype, device=device)
    weight = weight_of(outputs, inputs, dtype, device)
    out_1O, wanted_1O = (poisoned(1, outputs, dtype, device) for _ in range(2))
    kernel.linear(x_1I, weight, out_1O)
    reference.linear(x_1I, weight, wanted_1O)
    check(out_1O, wanted_1O, dtype)
    check_surroundings(out_1O)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 3, 16, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(72, 200), (65, 130), (24, 36), (1, 130)])
def test_several_rows(device: torch.device, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x_TI = normal(rows, inputs, dtype=dtype, device=device)
    weight = weight_of(outputs, inputs, dtype, device)
    out_TO, wanted_TO = (poisoned(rows, outputs, dtype, device) for _ in range(2))
    kernel.linear(x_TI, weight, out_TO)
    reference.linear(x_TI, weight, wanted_TO)
    check(out_TO, wanted_TO, dtype)
    check_surroundings(out_TO)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_reference_is_the_formula(rows: int) -> None:
    cpu = torch.device("cpu")
    x_TI, bias_O = normal(rows, 40, device=cpu), normal(6, device=cpu)
    weight = weight_of(6, 40, torch.float32, cpu)
    y_TO = torch.einsum("ti,oi->to", x_TI.double(), weight.weight_OI.double())
    out_TO = torch.ones(rows, 6)
    reference.linear(x_TI, weight, out_TO, bias_O=bias_O, into_residual=True)
    torch.testing.assert_close(out_TO.double(), 1 + y_TO + bias_O.double(), rtol=1e-5, atol=1e-5)
    out_TF = torch.full((rows, 3), torch.nan)
    reference.linear(x_TI, SmallWeight.of(weight.weight_OI, gated=True), out_TF)
    torch.testing.assert_close(out_TF.double(), silu(y_TO[:, :3]) * y_TO[:, 3:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("into_residual", [False, True])
def test_a_bias_is_added_before_rounding(device: torch.device, rows: int, into_residual: bool) -> None:
    x_TI = normal(rows, 96, dtype=torch.bfloat16, device=device)
    bias_O = normal(12, dtype=torch.bfloat16, device=device)
    weight = weight_of(12, 96, torch.bfloat16, device)
    out_TO = normal(rows, 12, device=device)
    wanted_TO = out_TO.clone()
    kernel.linear(x_TI, weight, out_TO, bias_O=bias_O, into_residual=into_residual)
    reference.linear(x_TI, weight, wanted_TO, bias_O=bias_O, into_residual=into_residual)
    check(out_TO, wanted_TO, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_adding_into_the_residual_is_the_product_added_afterwards(
    device: torch.device, rows: int, dtype: torch.dtype
) -> None:
    x_TI = normal(rows, 136, dtype=dtype, device=device)
    weight = weight_of(12, 136, dtype, device)
    residual_TO = normal(rows, 12, device=device, seed=1)
    y_TO = torch.full((rows, 12), torch.nan, device=device)
    kernel.linear(x_TI, weight, y_TO)
    wanted_TO = residual_TO + y_TO
    kernel.linear(x_TI, weight, residual_TO, into_residual=True)
    check(residual_TO, wanted_TO, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 5), (1, 1), (2, 1), (2, 16), (2, 70), (20, 70), (64, 70)])
def test_a_gated_product_is_the_product_gated_afterwards(
    device: torch.device, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x_TI = normal(rows, 144, dtype=dtype, device=device)
    weight = weight_of(2 * inner, 144, dtype, device, gated=True)
    gate_up_TF = torch.full((rows, 2 * inner), torch.nan, device=device)
    out_TF, wanted_TF = (poisoned(rows, inner, dtype, device) for _ in range(2))
    kernel.linear(x_TI, SmallWeight.of(weight.weight_OI), gate_up_TF)
    activation.silu_mul(gate_up_TF, wanted_TF)
    kernel.linear(x_TI, weight, out_TF)
    check(out_TF, wanted_TF, dtype)
    check_surroundings(out_TF)


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("has_boxes", [False, True])
def test_both_sides_of_the_tensor_cores_and_both_ways_to_load_agree(
    device: torch.device, is_swapped: bool, has_boxes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = TileForm(64, block_outputs=64, block_inputs=64, num_stages=3, is_swapped=is_swapped)
    monkeypatch.setattr(kernel, "choose", lambda *_, **__: form)
    x_TI = normal(35, 168, dtype=torch.bfloat16, device=device)
    weight = weight_of(90, 168, torch.bfloat16, device)
    assert weight.boxes
    weight = weight if has_boxes else SmallWeight(weight.weight_OI, weight.is_gated, boxes={})
    out_TO, wanted_TO = (poisoned(35, 90, torch.bfloat16, device) for _ in range(2))
    kernel.linear(x_TI, weight, out_TO)
    reference.linear(x_TI, weight, wanted_TO)
    check(out_TO, wanted_TO, torch.bfloat16)
    check_surroundings(out_TO)


def test_rows_of_nan_and_memory_beyond_x_reach_no_other_row(device: torch.device) -> None:
    wide = torch.full((24, 112), torch.nan, dtype=torch.bfloat16, device=device)
    x_TI = wide[2:21, :104]
    x_TI[:17] = normal(17, 104, dtype=torch.bfloat16, device=device)
    weight = weight_of(40, 104, torch.bfloat16, device)
    out_TO, wanted_TO = (torch.zeros(19, 40, device=device) for _ in range(2))
    kernel.linear(x_TI, weight, out_TO)
    reference.linear(x_TI[:17], weight, wanted_TO[:17])
    check(out_TO[:17], wanted_TO[:17], torch.float32)
    assert out_TO[17:].isnan().all()


@pytest.mark.parametrize(("rows", "outputs"), [(1, 9), (16, 130)])
def test_logits_of_the_head_come_in_float32(device: torch.device, rows: int, outputs: int) -> None:
    x_TI = normal(rows, 64, dtype=torch.bfloat16, device=device)
    weight = weight_of(outputs, 64, torch.bfloat16, device)
    logits_TV = poisoned(rows, outputs, torch.float32, device)
    kernel.linear(x_TI, weight, logits_TV)
    wanted_TV = x_TI.double() @ weight.weight_OI.double().T
    torch.testing.assert_close(logits_TV.double(), wanted_TV, rtol=1e-5, atol=1e-5)


def test_weights_that_boxes_cannot_load_have_none(device: torch.device) -> None:
    assert weight_of(16, 64, torch.bfloat16, device).boxes
    assert not weight_of(16, 36, torch.bfloat16, device).boxes  # rows of 72 bytes
    assert not SmallWeight.of(torch.zeros(65 * 64, dtype=torch.bfloat16, device=device)[1:4097].view(64, 64)).boxes
    assert not weight_of(16, 64, torch.float32, device).boxes


def test_the_kernel_is_worth_it_for_few_rows_and_only_with_boxes_for_several(device: torch.device) -> None:
    boxed, plain = (weight_of(16, inputs, torch.bfloat16, device) for inputs in (64, 36))
    assert [boxed.is_worth(rows) for rows in (1, 2, 64, 65, 8192)] == [True, True, True, False, False]
    assert [plain.is_worth(rows) for rows in (1, 2, 65)] == [True, False, False]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (128256, 4096), (960, 576), (24, 36)])
def test_every_form_fits_a_multiprocessor_and_covers_the_rows(outputs: int, inputs: int, gated: bool) -> None:
    for rows in range(1, MAX_ROWS + 1):
        for element_bytes in (2, 4):
            form = choose(rows, outputs, inputs, element_bytes=element_bytes, gated=gated)
            if rows == 1:
                assert isinstance(form, RowForm)
                assert form.block_inputs < 2 * max(inputs, 256) and form.block_inputs % (32 * form.num_warps) == 0
                continue
            assert isinstance(form, TileForm)
            assert form.block_rows >= rows and form.num_stages >= 2
            assert not form.is_swapped or form.block_outputs >= 64 or element_bytes == 4
            rows_loaded = form.block_rows + form.block_outputs * (2 if gated else 1)
            assert form.num_stages * rows_loaded * form.block_inputs * element_bytes <= 205 * 1024


def test_a_weight_has_the_boxes_of_every_form_it_may_take(device: torch.device) -> None:
    for gated in (False, True):
        weight = weight_of(64, 64, torch.bfloat16, device, gated=gated)
        for rows in range(2, MAX_ROWS + 1):
            form = choose(rows, 64, 64, gated=gated)
            assert isinstance(form, TileForm)
            assert (form.block_outputs, form.block_inputs) in weight.boxes
