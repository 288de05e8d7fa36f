"""Which form a product of few rows with a big weight takes. Arithmetic on sizes; refuses to know any device."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
PIPELINE_BYTES = 200 * 1024  # of the 227 KB a program may have on Hopper; the rest is for the epilogue
MAX_STAGES = 8
BLOCK_INPUTS = 128
ROW_BLOCK = 4096  # of one row of the weight, with one row of x
GATED_ROW_BLOCK = 4096  # of each of two rows; 40 registers a thread, six programs a multiprocessor
WARP_INPUTS = 512  # two loads of 16 bytes a thread


@dataclass(frozen=True, slots=True)
class RowForm:
    """One row of x: a program makes one output, with `block_inputs` columns of its weights at a time in registers."""

    block_inputs: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TileForm:
    """A program makes `block_outputs` columns of y for `block_rows` rows.

    `is_swapped`: the weight is the left side of the tensor cores' product, which has to be 64 tall, and the few rows of
    x the right side, which may be 16 wide.
    """

    block_rows: int
    block_outputs: int
    block_inputs: int
    num_stages: int
    is_swapped: bool = True
    num_warps: int = 4


def choose(
    num_rows: int, outputs: int, inputs: int, *, element_bytes: int = 2, gated: bool = False
) -> RowForm | TileForm:
    """The form for 1 to `MAX_ROWS` rows of x with a weight (outputs, inputs) of `element_bytes` an element.

    The weight is read once and nothing is split: partial sums cost more than idle multiprocessors gain. A gated weight
    has outputs / 2 rows of either half.
    """
    assert 1 <= num_rows <= MAX_ROWS, num_rows
    if num_rows == 1:
        return _row_form(inputs, gated)
    block_rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    if element_bytes > 2:
        return TileForm(block_rows, block_outputs=32, block_inputs=32, num_stages=2)
    block_outputs = _block_outputs(block_rows, outputs, gated)
    return TileForm(
        block_rows,
        block_outputs,
        block_inputs=BLOCK_INPUTS,
        num_stages=_num_stages(block_rows + block_outputs * (2 if gated else 1), inputs),
        is_swapped=block_outputs >= 64,
    )


def _row_form(inputs: int, gated: bool) -> RowForm:
    """Measured on a chain of a layer's products: wide blocks of many warps, so that a row is one or two round trips."""
    block = GATED_ROW_BLOCK if gated else ROW_BLOCK
    while block > 256 and block >= 2 * inputs:
        block //= 2
    return RowForm(block_inputs=block, num_warps=max(4, block // WARP_INPUTS))


def _block_outputs(block_rows: int, outputs: int, gated: bool) -> int:
    """Measured: many rows on a narrow weight want more programs, on a wide one fewer readings of x."""
    if block_rows < 64 or gated:
        return 64
    return 32 if outputs <= 4096 else 64 if outputs <= 16384 else 128


def _num_stages(rows_loaded: int, inputs: int) -> int:
    """As many as there is memory for; a short row leaves room for a second program instead."""
    steps = (inputs + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    return min(PIPELINE_BYTES // (rows_loaded * BLOCK_INPUTS * 2), MAX_STAGES, max(steps, 2))
