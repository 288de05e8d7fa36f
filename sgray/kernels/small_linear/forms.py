"""Which form a product of few rows with a big weight takes. Arithmetic on sizes; refuses to know any device."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
PIPELINE_BYTES = 200 * 1024  # of the 227 KB a program may have on Hopper; the rest is for the epilogue
MAX_STAGES = 8
BLOCK_INPUTS = 128


@dataclass(frozen=True, slots=True)
class RowForm:
    """One row of x: a program makes `outputs` of y, `block_inputs` columns of the weight at a time in registers."""

    outputs: int
    block_inputs: int
    num_warps: int = 4


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
    num_rows: int, outputs: int, inputs: int, *, element_bytes: int = 2, gated: bool = False, normed: bool = False
) -> RowForm | TileForm:
    """The form for 1 to `MAX_ROWS` rows of x with a weight (outputs, inputs) of `element_bytes` an element.

    The weight is read once and nothing is split: partial sums cost more than idle multiprocessors gain. A gated weight
    has outputs / 2 rows of either half. `normed`: the row of x is float32 and its norm is folded in.
    """
    assert 1 <= num_rows <= MAX_ROWS, num_rows
    if num_rows == 1:
        return _row_form(outputs, inputs, gated, normed)
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


def _row_form(outputs: int, inputs: int, gated: bool, normed: bool) -> RowForm:
    """Two outputs share a reading of x and of the norm's weights, which are four times the bytes of one weight row.

    Without a norm they are as many at most, and one output a program is faster.
    """
    is_paired = gated or (normed and outputs % 2 == 0 and outputs >= 4096)
    block = 2048 if is_paired else 4096
    while block > 256 and block >= 2 * inputs:
        block //= 2
    return RowForm(outputs=2 if is_paired else 1, block_inputs=block)


def _block_outputs(block_rows: int, outputs: int, gated: bool) -> int:
    """Measured: many rows on a narrow weight want more programs, on a wide one fewer readings of x."""
    if block_rows < 64 or gated:
        return 64
    return 32 if outputs <= 4096 else 64 if outputs <= 16384 else 128


def _num_stages(rows_loaded: int, inputs: int) -> int:
    """As many as there is memory for; a short row leaves room for a second program instead."""
    steps = (inputs + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    return min(PIPELINE_BYTES // (rows_loaded * BLOCK_INPUTS * 2), MAX_STAGES, max(steps, 2))
