"""The layout of a step's one buffer, and the tensors that are made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgray.kernels.batch import MAX_DEPTH, BatchTables, SharedTables

ON_DEVICE = -1
"""In place of a token that the device drew itself and the host does not know yet."""

NUM_SEQUENCES, NUM_TOKENS, NUM_PAGES, NUM_UNITS = 0, 1, 2, 3
HEADER = 8
KINDS = ("slots", "starts", "lengths", "firsts", "draws")


@dataclass(frozen=True, slots=True)
class StepWords:
    """Offsets, in words, for at most so many sequences and tokens a step, and as many shared units as sequences.

    `draws` is 1 for a sequence whose next token is drawn. A new page is three words: its slot, its place in that slot's
    row of the page table, its id.
    """

    max_sequences: int
    max_tokens: int

    def place(self, kind: str) -> int:
        """Where the words of that kind begin, one a sequence."""
        return HEADER + KINDS.index(kind) * self.max_sequences

    @property
    def paths(self) -> int:
        """Where the paths begin, the first unit of every sequence first."""
        return HEADER + len(KINDS) * self.max_sequences

    @property
    def units(self) -> int:
        """Where the shared units begin, four words each."""
        return self.paths + MAX_DEPTH * self.max_sequences

    @property
    def tokens(self) -> int:
        """Where the tokens begin."""
        return self.units + 4 * self.max_sequences

    @property
    def pages(self) -> int:
        """Where the new pages begin; they are last, because they alone may be many."""
        return self.tokens + self.max_tokens

    def tables(self, words: Tensor, num_sequences: int) -> BatchTables:
        """Views of the buffer for steps of at most `num_sequences` sequences."""

        def words_of(kind: str) -> Tensor:
            return words[self.place(kind) : self.place(kind) + num_sequences]

        return BatchTables(
            slots_B=words_of("slots"),
            starts_B=words_of("starts"),
            lengths_B=words_of("lengths"),
            firsts_B=words_of("firsts"),
            num_sequences_1=words[NUM_SEQUENCES : NUM_SEQUENCES + 1],
            num_tokens_1=words[NUM_TOKENS : NUM_TOKENS + 1],
            shared=SharedTables(
                units_U4=words[self.units : self.tokens].view(-1, 4),
                paths_DB=words[self.paths : self.units].view(MAX_DEPTH, -1)[:, :num_sequences],
                num_units_1=words[NUM_UNITS : NUM_UNITS + 1],
            ),
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step's kernels read: int32, for T rows and B sequences.

    `last_rows_B` are the rows that the next tokens are drawn from, `draw_slots_B` the slots (-1: nothing is drawn) and
    `draw_positions_B` the positions of these tokens.
    """

    tokens_T: Tensor
    positions_T: Tensor
    locations_T: Tensor
    last_rows_B: Tensor
    draw_slots_B: Tensor
    draw_positions_B: Tensor

    @classmethod
    def allocate(cls, max_tokens: int, max_sequences: int, device: torch.device) -> StepRows:
        """Rows of padding."""

        def words(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=device)

        rows = [words(max_tokens, value) for value in (0, 0, -1)]
        return cls(*rows, *(words(max_sequences, value) for value in (0, -1, 0)))

    def first(self, num_tokens: int, num_sequences: int) -> StepRows:
        """Views for smaller steps."""
        rows = [tensor[:num_tokens] for tensor in (self.tokens_T, self.positions_T, self.locations_T)]
        draws = (self.last_rows_B, self.draw_slots_B, self.draw_positions_B)
        return StepRows(*rows, *(tensor[:num_sequences] for tensor in draws))
