"""Products of rows with the weight of their group in Triton: a program makes a tile of one block's outputs.

Refuses to know what the groups are. Programs of neighbouring blocks follow each other, so that those of one group find
its weight in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgray.kernels.grouped_linear.groups import Groups


@dataclass(frozen=True, slots=True)
class Form:
    """The tile of a program, and how it is computed."""

    block_outputs: int
    block_inputs: int
    num_stages: int
    num_warps: int


def choose(block_rows: int, element_bytes: int) -> Form:
    """The form for blocks of so many rows. Not measured: what fits into shared memory and registers."""
    if element_bytes > 2:
        return Form(block_outputs=32, block_inputs=32, num_stages=2, num_warps=4)
    if block_rows <= 32:
        return Form(block_outputs=64, block_inputs=128, num_stages=4, num_warps=4)
    return Form(block_outputs=128, block_inputs=64, num_stages=3, num_warps=8 if block_rows > 64 else 4)


def grouped_linear(
    x_RI: Tensor,
    weight_EOI: Tensor,
    groups: Groups,
    out_SO: Tensor,
    *,
    in_rows_P: Tensor | None = None,
    out_rows_P: Tensor | None = None,
    scales_P: Tensor | None = None,
) -> None:
    """See the contract of this folder. Modifies `out_SO`."""
    _, outputs, inputs = weight_EOI.shape
    assert x_RI.shape[1] == inputs and out_SO.shape[1] == outputs, (x_RI.shape, weight_EOI.shape, out_SO.shape)
    assert weight_EOI.is_contiguous() and x_RI.dtype == weight_EOI.dtype, (weight_EOI.stride(), x_RI.dtype)
    assert x_RI.stride(1) == 1 and out_SO.stride(1) == 1
    assert scales_P is None or scales_P.dtype == torch.float32
    form = choose(groups.block_rows, weight_EOI.element_size())
    num_blocks = groups.blocks_3B.shape[1]
    _grouped[(num_blocks, triton.cdiv(outputs, form.block_outputs))](
        x_RI,
        weight_EOI,
        groups.blocks_3B,
        in_rows_P,
        out_rows_P,
        scales_P,
        out_SO,
        num_blocks,
        outputs,
        x_RI.stride(0),
        out_SO.stride(0),
        INPUTS=inputs,
        BLOCK_ROWS=groups.block_rows,
        BLOCK_OUTPUTS=form.block_outputs,
        BLOCK_INPUTS=form.block_inputs,
        STAGES=form.num_stages,
        num_warps=form.num_warps,
        num_stages=form.num_stages,
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped(
    x_ptr,
    weight_ptr,
    blocks_ptr,
    in_rows_ptr,
    out_rows_ptr,
    scales_ptr,
    out_ptr,
    num_blocks,
    num_outputs,
    x_stride,
    out_stride,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs [first, first + BLOCK_OUTPUTS) of the rows of one block; nothing for a block that is not needed."""
    block = tl.program_id(0)
    group = tl.load(blocks_ptr + block).to(tl.int64)
    place = tl.load(blocks_ptr + num_blocks + block)
    last = tl.load(blocks_ptr + 2 * num_blocks + block)
    if place >= last:
        return
    places = place + tl.arange(0, BLOCK_ROWS)
    is_row = places < last
    in_rows = _rows(in_rows_ptr, places, is_row)
    out_rows = _rows(out_rows_ptr, places, is_row)
    outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < num_outputs
    columns = tl.arange(0, BLOCK_INPUTS)
    xs = x_ptr + in_rows[:, None] * x_stride
    weights = weight_ptr + (group * num_outputs + outputs)[:, None] * INPUTS
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        is_input = (start + columns < INPUTS)[None, :]
        x = tl.load(xs + (start + columns)[None, :], mask=is_row[:, None] & is_input, other=0.0)
        w = tl.load(weights + (start + columns)[None, :], mask=is_output[:, None] & is_input, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + places, mask=is_row, other=0.0)[:, None]
    outs = out_ptr + out_rows[:, None] * out_stride + outputs[None, :]
    tl.store(outs, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _rows(rows_ptr, places, is_row):
    """The rows at these places."""
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + places, mask=is_row, other=0).to(tl.int64)
    else:
        rows = places.to(tl.int64)
    return rows
