"""The step's inputs from the step's words: kernel and reference agree, padding included."""

from __future__ import annotations

import random

import pytest
import torch

from sgray.kernels.step_inputs import kernel, reference
from sgray.kernels.step_inputs.words import KINDS, NUM_SEQUENCES, NUM_TOKENS, ON_DEVICE, StepRows, StepWords

PAGE_SIZE = 16


def some_step(lengths: list[int], layout: StepWords, seed: int = 0) -> tuple[torch.Tensor, int]:
    """Words of a step with these lengths, and the number of pages used so far."""
    rng = random.Random(seed)
    words = torch.full((layout.pages + 500,), 123456, dtype=torch.int32)
    words[NUM_SEQUENCES], words[NUM_TOKENS] = len(lengths), sum(lengths)
    slots = rng.sample(range(9), len(lengths))
    first = offset = 0
    for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        start = rng.randrange(40)
        begin = rng.randrange(start // PAGE_SIZE + 1)
        count = -(-(start + length) // PAGE_SIZE) - begin
        values = (slot, start, length, first, rng.randrange(2), begin, count, offset)
        for kind, value in zip(KINDS, values, strict=True):
            words[layout.place(kind) + index] = value
        words[layout.pages + offset : layout.pages + offset + count] = torch.tensor(rng.sample(range(900), count))
        first, offset = first + length, offset + count
    words[layout.tokens : layout.tokens + first] = torch.tensor(
        [rng.choice((ON_DEVICE, rng.randrange(1000))) for _ in range(first)], dtype=torch.int32
    )
    return words, offset


@pytest.mark.parametrize("lengths", [[], [1], [1, 1, 1], [300, 1, 17, 1], [5, 2, 1, 1, 1, 1, 600]], ids=str)
def test_kernel_and_reference_agree(lengths: list[int], device: torch.device) -> None:
    layout = StepWords(max_sequences=12, max_tokens=700)
    words, _ = some_step(lengths, layout)
    table = torch.randint(0, 900, (10, 60), dtype=torch.int32)
    last = torch.randint(0, 1000, (10,), dtype=torch.int32)
    wanted = StepRows.allocate(650, 8, torch.device("cpu"))
    wanted_table = table.clone()
    reference.expand_step(words, layout, wanted_table, last, wanted, page_size=PAGE_SIZE)
    found, found_table = StepRows.allocate(650, 8, device), table.to(device)
    for name in found.__slots__:
        getattr(found, name).fill_(-77)
    kernel.expand_step(words.to(device), layout, found_table, last.to(device), found, page_size=PAGE_SIZE)
    assert torch.equal(found_table.cpu(), wanted_table)
    for name in found.__slots__:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


def test_a_drawn_token_is_found_by_the_next_step(device: torch.device) -> None:
    last = torch.zeros(5, dtype=torch.int32, device=device)
    tokens, slots = torch.tensor([7, -1, 9, 4], dtype=torch.int32), torch.tensor([3, 1, -1, 0], dtype=torch.int32)
    wanted = torch.zeros(5, dtype=torch.int32)
    reference.record_tokens(tokens, slots, wanted)
    kernel.record_tokens(tokens.to(device), slots.to(device), last)
    assert wanted.tolist() == last.tolist() == [4, 0, 0, 7, 0]
