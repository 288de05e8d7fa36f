"""The step's inputs from the step's words: kernel and reference agree, padding included."""

from __future__ import annotations

import random

import pytest
import torch

from sgray.kernels.step_inputs import kernel, reference
from sgray.kernels.step_inputs.words import KINDS, NUM_PAGES, NUM_SEQUENCES, NUM_TOKENS, ON_DEVICE, StepRows, StepWords

PAGE_SIZE = 16


def some_step(lengths: list[int], layout: StepWords, seed: int = 0) -> torch.Tensor:
    """Words of a step with these lengths; where nothing stands, numbers that would be noticed."""
    rng = random.Random(seed)
    words = torch.full((layout.pages + 3 * 900,), 123456, dtype=torch.int32)
    slots = rng.sample(range(9), len(lengths))
    first, pages = 0, []
    for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        start = rng.randrange(40)
        for kind, value in zip(KINDS, (slot, start, length, first, rng.randrange(2)), strict=True):
            words[layout.place(kind) + index] = value
        begin = rng.randrange(start // PAGE_SIZE + 1)
        pages += [(slot, place, rng.randrange(900)) for place in range(begin, -(-(start + length) // PAGE_SIZE))]
        first += length
    words[NUM_SEQUENCES], words[NUM_TOKENS], words[NUM_PAGES] = len(lengths), first, len(pages)
    words[layout.pages : layout.pages + 3 * len(pages)] = torch.tensor(pages, dtype=torch.int32).flatten()
    words[layout.tokens : layout.tokens + first] = torch.tensor(
        [rng.choice((ON_DEVICE, rng.randrange(1000))) for _ in range(first)], dtype=torch.int32
    )
    return words


@pytest.mark.parametrize("lengths", [[], [1], [1, 1, 1], [300, 1, 17, 1], [5, 2, 1, 1, 1, 1, 600], [9000, 1]], ids=str)
def test_kernel_and_reference_agree(lengths: list[int], device: torch.device) -> None:
    layout = StepWords(max_sequences=12, max_tokens=9100)
    words = some_step(lengths, layout)
    table = torch.randint(0, 900, (10, 600), dtype=torch.int32)
    last = torch.randint(0, 1000, (10,), dtype=torch.int32)
    wanted = StepRows.allocate(9050, 8, torch.device("cpu"))
    wanted_table = table.clone()
    reference.expand_step(words, layout, wanted_table, last, wanted, page_size=PAGE_SIZE)
    found, found_table = StepRows.allocate(9050, 8, device), table.to(device)
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
