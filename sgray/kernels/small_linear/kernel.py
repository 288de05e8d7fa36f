"""Products of few rows in Triton: one row in registers, up to 64 by tensor cores. Refuses to know the layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from sgray.kernels.launch import features
from sgray.kernels.small_linear.forms import MAX_ROWS, RowForm, TileForm, choose


@dataclass(frozen=True, slots=True)
class SmallWeight:
    """A weight (O, I) and, where it can be loaded by boxes, a descriptor for each size of box the forms use.

    The descriptors hold the address of the weight: it may be overwritten but not moved.
    """

    weight_OI: Tensor
    is_gated: bool
    boxes: Mapping[tuple[int, int], Any]

    @staticmethod
    def of(weight_OI: Tensor, *, gated: bool = False) -> SmallWeight:
        """Reads nothing of the weight but its address and sizes. Outside of a graph's capture, once."""
        assert weight_OI.is_contiguous(), weight_OI.stride()
        assert not gated or weight_OI.shape[0] % 2 == 0, weight_OI.shape
        boxes = {}
        if _takes_boxes(weight_OI):
            for block_rows in (16, 32, MAX_ROWS):
                form = choose(block_rows, *weight_OI.shape, gated=gated)
                assert isinstance(form, TileForm)
                shape = (form.block_outputs, form.block_inputs)
                boxes[shape] = TensorDescriptor.from_tensor(weight_OI, list(shape))
        return SmallWeight(weight_OI, gated, boxes)

    def is_worth(self, num_rows: int) -> bool:
        """Whether `linear` beats `torch.mm` and the kernels it saves.

        On an H200 with Llama-3.1-8B's shapes: one row always (4 to 31 %); up to 64 rows, with boxes, by 3 to 16 %, but
        for gate and up at 8 to 32 rows, which lose 2 % and then need no kernel for the gate.
        """
        return num_rows == 1 or (num_rows <= MAX_ROWS and bool(self.boxes))


def linear(
    x_TI: Tensor,
    weight: SmallWeight,
    out_TO: Tensor,
    *,
    bias_O: Tensor | None = None,
    into_residual: bool = False,
    pdl: bool = False,
) -> None:
    """See the contract of this folder. Modifies `out_TO`."""
    outputs, inputs = weight.weight_OI.shape
    assert x_TI.shape[1] == inputs and out_TO.shape == (x_TI.shape[0], outputs // (2 if weight.is_gated else 1))
    assert x_TI.stride(1) == 1 and out_TO.stride(1) == 1 and x_TI.dtype == weight.weight_OI.dtype
    assert not (weight.is_gated and bias_O is not None)
    assert not into_residual or out_TO.dtype == torch.float32
    element_bytes = weight.weight_OI.element_size()
    form = choose(x_TI.shape[0], outputs, inputs, element_bytes=element_bytes, gated=weight.is_gated)
    launch = {"launch_pdl": True} if pdl else {}
    if isinstance(form, RowForm):
        _launch_row(form, x_TI, weight, out_TO, bias_O, into_residual, launch)
    else:
        _launch_tile(form, x_TI, weight, out_TO, bias_O, into_residual, launch)


def _launch_row(
    form: RowForm,
    x_1I: Tensor,
    weight: SmallWeight,
    out_1O: Tensor,
    bias_O: Tensor | None,
    into_residual: bool,
    launch: dict[str, bool],
) -> None:
    outputs = out_1O.shape[1]
    _row[(outputs,)](
        x_1I,
        weight.weight_OI,
        bias_O,
        out_1O,
        outputs,
        INPUTS=x_1I.shape[1],
        BLOCK=form.block_inputs,
        GATED=weight.is_gated,
        ADD=into_residual,
        PDL=bool(launch),
        num_warps=form.num_warps,
        **launch,
    )


def _launch_tile(
    form: TileForm,
    x_TI: Tensor,
    weight: SmallWeight,
    out_TO: Tensor,
    bias_O: Tensor | None,
    into_residual: bool,
    launch: dict[str, bool],
) -> None:
    rows, inputs = x_TI.shape
    box = weight.boxes.get((form.block_outputs, form.block_inputs))
    by_boxes = box is not None and _takes_boxes(x_TI)
    _tile[(triton.cdiv(out_TO.shape[1], form.block_outputs),)](
        TensorDescriptor.from_tensor(x_TI, [form.block_rows, form.block_inputs]) if by_boxes else x_TI,
        box if by_boxes else weight.weight_OI,
        bias_O,
        out_TO,
        rows,
        out_TO.shape[1],
        x_TI.stride(0),
        out_TO.stride(0),
        INPUTS=inputs,
        BLOCK_ROWS=form.block_rows,
        BLOCK_OUTPUTS=form.block_outputs,
        BLOCK_INPUTS=form.block_inputs,
        STAGES=form.num_stages,
        BOXES=by_boxes,
        SWAPPED=form.is_swapped,
        GATED=weight.is_gated,
        ADD=into_residual,
        PDL=bool(launch),
        num_warps=form.num_warps,
        **launch,
    )


def _takes_boxes(matrix: Tensor) -> bool:
    """The tensor memory accelerator wants 16-byte addresses and strides. float32 is for checking and goes without."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    is_aligned = matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0
    return is_aligned and matrix.dtype != torch.float32 and features(matrix.device).has_tma


@triton.jit
def _row(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One output. If GATED, the weight's rows from `num_outputs` on are the up half."""
    output = tl.program_id(0)
    rows = weight_ptr + output.to(tl.int64) * INPUTS
    ups = weight_ptr + (output + num_outputs).to(tl.int64) * INPUTS
    # What no predecessor writes is on its way before the wait, what the end needs before the products.
    a = _chunk(rows, 0, INPUTS, BLOCK, "evict_first")
    if GATED:
        b = _chunk(ups, 0, INPUTS, BLOCK, "evict_first")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + output)
    if PDL:
        gdc_wait()
    if ADD:
        before = tl.load(out_ptr + output)
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, INPUTS, BLOCK):
        x = _chunk(x_ptr, start, INPUTS, BLOCK, "").to(tl.float32)
        if start + BLOCK < INPUTS:
            next_a = _chunk(rows, start + BLOCK, INPUTS, BLOCK, "evict_first")
            if GATED:
                next_b = _chunk(ups, start + BLOCK, INPUTS, BLOCK, "evict_first")
        sum_a += a.to(tl.float32) * x
        if GATED:
            sum_b += b.to(tl.float32) * x
        if start + BLOCK < INPUTS:
            a = next_a
            if GATED:
                b = next_b
    if PDL:
        gdc_launch_dependents()
    y = tl.sum(sum_a, 0)
    if GATED:
        y = _gate(y, tl.sum(sum_b, 0))
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    if ADD:
        y += before
    tl.store(out_ptr + output, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _chunk(row_ptr, start: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Columns [start, start + BLOCK) of a row, zeros beyond its end."""
    columns = start + tl.arange(0, BLOCK)
    if start + BLOCK <= INPUTS:
        chunk = tl.load(row_ptr + columns, eviction_policy=POLICY)
    else:
        chunk = tl.load(row_ptr + columns, mask=columns < INPUTS, other=0.0, eviction_policy=POLICY)
    return chunk


@triton.jit
def _gate(gate, up):
    """silu(gate) * up."""
    return gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up


@triton.jit(do_not_specialize=["num_rows"])
def _tile(
    x,
    weight,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    x_stride,
    out_stride,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    BOXES: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs [first, first + BLOCK_OUTPUTS) of all rows. `x` and `weight` are descriptors if BOXES, else pointers."""
    first = tl.program_id(0) * BLOCK_OUTPUTS
    weight_rows = num_outputs * 2 if GATED else num_outputs
    rows = tl.arange(0, BLOCK_ROWS)
    outputs = first + tl.arange(0, BLOCK_OUTPUTS)
    mask = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    outs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    # What the end adds arrives during the products: registers are not what limits the programs of a multiprocessor.
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)
    if PDL:
        gdc_wait()
    if ADD:
        before = tl.load(outs, mask=mask, other=0.0)
    if SWAPPED:
        acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    else:
        acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    up = acc
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        x_rows = _box(x, 0, start, num_rows, x_stride, INPUTS, BLOCK_ROWS, BLOCK_INPUTS, BOXES)
        w = _box(weight, first, start, weight_rows, INPUTS, INPUTS, BLOCK_OUTPUTS, BLOCK_INPUTS, BOXES)
        acc = _dot(w, x_rows, acc, SWAPPED)
        if GATED:
            w = _box(
                weight, num_outputs + first, start, weight_rows, INPUTS, INPUTS, BLOCK_OUTPUTS, BLOCK_INPUTS, BOXES
            )
            up = _dot(w, x_rows, up, SWAPPED)
    if PDL:
        gdc_launch_dependents()
    y = _gate(acc, up) if GATED else acc
    if SWAPPED:
        y = tl.trans(y)
    if bias_ptr is not None:
        y += bias.to(tl.float32)[None, :]
    if ADD:
        y += before
    tl.store(outs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _box(
    matrix,
    row,
    column,
    num_rows,
    stride,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOXES: tl.constexpr,
):
    """(ROWS, COLUMNS) of a matrix from (row, column) on, zeros beyond its edges."""
    if BOXES:
        box = matrix.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        mask = (rows < num_rows)[:, None] & (columns < INPUTS)[None, :]
        box = tl.load(matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return box


@triton.jit
def _dot(weights, rows, acc, SWAPPED: tl.constexpr):
    if SWAPPED:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc
