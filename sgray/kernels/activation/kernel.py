"""The gate of the MLP in Triton: one program a stretch of a row. Refuses to know where its input comes from."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def silu_mul(gate_up_TF: Tensor, out_TF: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out_TF`."""
    rows, inner = out_TF.shape
    block = block_of(inner)
    blocks = triton.cdiv(inner, block)
    _silu_mul[(rows * blocks,)](
        gate_up_TF,
        out_TF,
        gate_up_TF.stride(0),
        out_TF.stride(0),
        INNER=inner,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def block_of(inner: int) -> int:
    """Columns of a program: 2048 keep two wide loads of either half in flight, where that wastes nothing."""
    if inner % 2048 == 0:
        return 2048
    return min(triton.next_power_of_2(inner), 1024)


@triton.jit
def _silu_mul(
    gate_up_ptr, out_ptr, gate_up_stride, out_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    blocks: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < INNER
    if PDL:
        gdc_wait()
    gates = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + INNER, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    y = gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=mask)
