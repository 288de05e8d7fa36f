"""What kernels are told of a step: which sequences compute how many tokens, as small tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_DEPTH = 4
"""Shared units that a sequence may read, one after the other."""

MAX_PLACE = 64
"""Tokens of a unit, and one more than the largest place in one."""


@dataclass(frozen=True, slots=True)
class SharedTables:
    """Keys that several sequences of a batch have in the same pages, so that one read can serve them all.

    A unit is a row of `units_U4`: slot, begin, end, number of tokens. It means the positions `[begin, end)` of that
    slot's pages, `begin` at the start of a page, and so many tokens of the batch that read them. Sequence b reads the
    units `paths_DB[:, b]` before its own keys: they cover its positions from 0 without a gap, and -1 stands behind the
    last. A word of a path is the unit times MAX_PLACE, plus the place of the sequence's first token among the unit's
    tokens. All int32; only the first `num_units_1[0]` units mean anything, and without any no path does.
    """

    units_U4: Tensor
    paths_DB: Tensor
    num_units_1: Tensor


@dataclass(frozen=True, slots=True)
class BatchTables:
    """Sequence b, in slot `slots_B[b]`, computes its tokens `[starts_B[b], starts_B[b] + lengths_B[b])`.

    Their flat rows begin at `firsts_B[b]`. All int32; only the first `num_sequences_1[0]` entries mean anything, and of
    the rows only the first `num_tokens_1[0]`. The tensors' sizes are what a launch must provide for.
    """

    slots_B: Tensor
    starts_B: Tensor
    lengths_B: Tensor
    firsts_B: Tensor
    num_sequences_1: Tensor
    num_tokens_1: Tensor
    shared: SharedTables | None = None
