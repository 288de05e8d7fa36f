"""What kernels are told of a step: which sequences compute how many tokens, as small tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
