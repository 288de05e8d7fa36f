"""Residual addition and RMS norm in Triton: one program a row, the row in registers. Refuses to know what follows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def add_rms_norm(
    residual_TI: Tensor, delta_TI: Tensor | None, weight_I: Tensor, eps: float, out_TI: Tensor, *, pdl: bool = False
) -> None:
    """See the contract of this folder. Modifies `residual_TI` and `out_TI`."""
    rows, inputs = residual_TI.shape
    block = triton.next_power_of_2(inputs)
    _add_rms_norm[(rows,)](
        residual_TI,
        delta_TI,
        weight_I,
        out_TI,
        eps,
        residual_TI.stride(0),
        0 if delta_TI is None else delta_TI.stride(0),
        out_TI.stride(0),
        INPUTS=inputs,
        BLOCK=block,
        PDL=pdl,
        num_warps=num_warps_of(block),
        **({"launch_pdl": True} if pdl else {}),
    )


def num_warps_of(block: int) -> int:
    """16 values a thread: enough requests in flight, and registers for four programs of 4096 on a multiprocessor."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _add_rms_norm(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    eps,
    residual_stride,
    delta_stride,
    out_stride,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Four values a thread and access, in every dtype: the float32 side then needs no exchange between threads.
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    mask = columns < INPUTS
    weights = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    residuals = residual_ptr + row * residual_stride + columns
    x = tl.load(residuals, mask=mask, other=0.0)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + row * delta_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(residuals, x, mask=mask)
    scale = tl.rsqrt(tl.sum(x * x, 0) / INPUTS + eps)
    if PDL:
        gdc_launch_dependents()
    y = x * scale * weights
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=mask)
