"""The new pages first; then one small program for each sequence, and one for the padding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgray.kernels.step_inputs.words import StepRows, StepWords

BLOCK = 256
PAGE_PROGRAMS = 8


def expand_step(
    words: Tensor,
    layout: StepWords,
    page_table_SP: Tensor,
    last_tokens_S: Tensor,
    rows: StepRows,
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Fills `rows` and writes new pages into the page table."""
    num_sequences, num_tokens = len(rows.last_rows_B), len(rows.tokens_T)
    _place_pages[(PAGE_PROGRAMS,)](
        words, page_table_SP, page_table_SP.stride(0), layout.pages, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    _expand[(num_sequences + 1,)](
        words,
        page_table_SP,
        last_tokens_S,
        rows.tokens_T,
        rows.positions_T,
        rows.locations_T,
        rows.last_rows_B,
        rows.draw_slots_B,
        rows.draw_positions_B,
        page_table_SP.stride(0),
        layout.max_sequences,
        layout.tokens,
        num_tokens,
        page_size=page_size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def record_tokens(tokens_B: Tensor, draw_slots_B: Tensor, last_tokens_S: Tensor, *, pdl: bool = False) -> None:
    """Keeps drawn tokens by slot; a token that could not be drawn (negative) is kept as 0."""
    count = len(draw_slots_B)
    grid = (triton.cdiv(count, BLOCK),)
    _record[grid](tokens_B, draw_slots_B, last_tokens_S, count, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)


@triton.jit(do_not_specialize=["pages_place"])
def _place_pages(words, page_table, table_stride, pages_place, BLOCK: tl.constexpr, PDL: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    count = tl.load(words + 2)
    for base in range(0, count, BLOCK * tl.num_programs(0)):
        page = base + offsets
        is_page = page < count
        triple = words + pages_place + 3 * page
        slot = tl.load(triple, mask=is_page, other=0)
        place = tl.load(triple + 1, mask=is_page, other=0)
        tl.store(page_table + slot.to(tl.int64) * table_stride + place, tl.load(triple + 2, mask=is_page), mask=is_page)
    if PDL:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["max_sequences", "tokens_place", "num_rows"])
def _expand(
    words,
    page_table,
    last_tokens,
    tokens,
    positions,
    locations,
    last_rows,
    draw_slots,
    draw_positions,
    table_stride,
    max_sequences,
    tokens_place,
    num_rows,
    page_size: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # The order of the words follows KINDS and HEADER of words.py.
    index = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    num_sequences = tl.load(words)
    num_tokens = tl.load(words + 1)
    if index == tl.num_programs(0) - 1:
        for base in range(num_tokens, num_rows, BLOCK):
            row = base + offsets
            is_row = row < num_rows
            tl.store(tokens + row, tl.zeros_like(row), mask=is_row)
            tl.store(positions + row, tl.zeros_like(row), mask=is_row)
            tl.store(locations + row, tl.zeros_like(row) - 1, mask=is_row)
    elif index >= num_sequences:
        tl.store(last_rows + index, 0)
        tl.store(draw_slots + index, -1)
        tl.store(draw_positions + index, 0)
    else:
        word = words + 8 + index
        slot = tl.load(word)
        start = tl.load(word + max_sequences)
        length = tl.load(word + 2 * max_sequences)
        first = tl.load(word + 3 * max_sequences)
        draws = tl.load(word + 4 * max_sequences)
        row_pages = page_table + slot.to(tl.int64) * table_stride
        drawn = tl.load(last_tokens + slot)
        for base in range(0, length, BLOCK):
            step = base + offsets
            is_row = step < length
            row = first + step
            position = start + step
            token = tl.load(words + tokens_place + row, mask=is_row, other=0)
            page = tl.load(row_pages + position // page_size, mask=is_row, other=0)
            tl.store(tokens + row, tl.where(token < 0, drawn, token), mask=is_row)
            tl.store(positions + row, position, mask=is_row)
            tl.store(locations + row, page * page_size + position % page_size, mask=is_row)
        tl.store(last_rows + index, first + length - 1)
        tl.store(draw_slots + index, tl.where(draws != 0, slot, -1))
        tl.store(draw_positions + index, start + length)
    if PDL:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["count"])
def _record(tokens, draw_slots, last_tokens, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    slot = tl.load(draw_slots + row, mask=row < count, other=-1)
    token = tl.load(tokens + row, mask=row < count, other=0)
    tl.store(last_tokens + slot, tl.maximum(token, 0), mask=slot >= 0)
    if PDL:
        gdc_launch_dependents()
