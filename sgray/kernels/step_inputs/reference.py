"""What the kernels compute, sequence by sequence in plain torch."""

from __future__ import annotations

from torch import Tensor

from sgray.kernels.step_inputs.words import (
    HEADER,
    KINDS,
    NUM_PAGES,
    NUM_SEQUENCES,
    NUM_TOKENS,
    ON_DEVICE,
    StepRows,
    StepWords,
)


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
    for tensor, padding in (
        (rows.tokens_T, 0),
        (rows.positions_T, 0),
        (rows.locations_T, -1),
        (rows.last_rows_B, 0),
        (rows.draw_slots_B, -1),
        (rows.draw_positions_B, 0),
    ):
        tensor.fill_(padding)
    assert int(words[NUM_TOKENS]) <= len(rows.tokens_T)
    pages = words[layout.pages : layout.pages + 3 * int(words[NUM_PAGES])].view(-1, 3)
    for slot, place, page in pages.tolist():
        page_table_SP[slot, place] = page
    for index in range(int(words[NUM_SEQUENCES])):
        kinds = {kind: int(words[HEADER + n * layout.max_sequences + index]) for n, kind in enumerate(KINDS)}
        _expand_sequence(words, layout, page_table_SP, last_tokens_S, rows, index, kinds, page_size)


def record_tokens(tokens_B: Tensor, draw_slots_B: Tensor, last_tokens_S: Tensor, *, pdl: bool = False) -> None:
    """Keeps drawn tokens by slot; a token that could not be drawn (negative) is kept as 0."""
    for token, slot in zip(tokens_B.tolist(), draw_slots_B.tolist(), strict=True):
        if slot >= 0:
            last_tokens_S[slot] = max(token, 0)


def _expand_sequence(
    words: Tensor,
    layout: StepWords,
    page_table_SP: Tensor,
    last_tokens_S: Tensor,
    rows: StepRows,
    index: int,
    kinds: dict[str, int],
    page_size: int,
) -> None:
    slot, start, length, first = (kinds[kind] for kind in ("slots", "starts", "lengths", "firsts"))
    for row in range(first, first + length):
        position = start + row - first
        token = int(words[layout.tokens + row])
        rows.tokens_T[row] = last_tokens_S[slot] if token == ON_DEVICE else token
        rows.positions_T[row] = position
        rows.locations_T[row] = page_table_SP[slot, position // page_size] * page_size + position % page_size
    rows.last_rows_B[index] = first + length - 1
    rows.draw_slots_B[index] = slot if kinds["draws"] else -1
    rows.draw_positions_B[index] = start + length
