"""The tiles that extends are cut into, and how large they are. Knows no kernel language."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64  # query rows of the smallest tile
LONG = 8192  # keys from which on larger tiles pay: a page then serves twice the rows


def choose_rows(head_dim: int, longest: int, large_from: int = LONG) -> int:
    """Query rows of a tile. Measured on an H200 with head_dim 128, in TFLOP/s: with 64 rows 345 at 1k keys, 440 at 4k,
    461 at 8k and 467 at 16k, with 128 rows 335, 435, 490 and 499."""
    return 2 * ROWS if longest >= large_from and head_dim <= 128 else ROWS


@dataclass(frozen=True, slots=True)
class TileShape:
    """A tile takes `keys` keys at a time; `stages` of those are under way."""

    keys: int
    warps: int
    stages: int


def choose(dtype: torch.dtype, head_dim: int, rows: int, *, has_boxes: bool) -> TileShape:
    """What a program of `rows` query rows does at a time, and with how many warps.

    Without bulk loads addresses take registers, and 128 rows need twice the warps to hold them.
    """
    if dtype == torch.float32:  # no tensor cores: only here to be exact
        return TileShape(keys=16, warps=max(head_dim // 8, 4), stages=1)
    if head_dim > 128:
        return TileShape(keys=64, warps=8, stages=2)
    if rows > ROWS and has_boxes:
        return TileShape(keys=64, warps=4, stages=2)
    return TileShape(keys=64, warps=rows // 16, stages=3)


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """Room for the plan of the largest step.

    A row of `tiles_N4` is a tile: slot, first flat row, its position, number of tokens; no tokens, no tile.
    `large_from`: keys from which on large tiles pay.
    """

    tiles_N4: Tensor
    max_sequences: int
    max_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    large_from: int

    @classmethod
    def allocate(
        cls,
        *,
        max_sequences: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        large_from: int = LONG,
    ) -> ExtendWork:
        """`max_tokens` of one step, over at most `max_sequences`."""
        capacity = max_tokens // (ROWS // (num_heads // num_kv_heads)) + max_sequences
        tiles_N4 = torch.zeros(capacity, 4, dtype=torch.int32, device=device)
        return cls(tiles_N4, max_sequences, max_tokens, num_heads, num_kv_heads, head_dim, large_from)


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """A step's tiles, filled in on the device: at most `tokens` tokens each, packed into `rows` query rows."""

    tiles_N4: Tensor
    rows: int
    tokens: int
    min_length: int
    max_sequences: int

    def capacity(self, num_tokens: int) -> int:
        """The most tiles that a step of `num_tokens` can have, known without looking."""
        num_sequences = min(self.max_sequences, num_tokens // self.min_length)
        return min(num_tokens // self.tokens + num_sequences, self.tiles_N4.shape[0])
