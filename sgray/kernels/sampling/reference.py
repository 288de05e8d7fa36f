"""Sampling in plain torch: every step on whole rows, filters by sorting. It is here to be believed, not to be fast.

Log-probabilities live here too, in torch operations that never wait for the device; they have no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgray.kernels.sampling.state import GENERATED_BITS, IS_MASKED, IS_PENALISED, SamplingState

LOG2_E = 1.4426950408889634
WORD = 0xFFFFFFFF
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
# Below this the logarithm of 1 - v loses digits and its series is used instead.
SMALL = 0.01


def sample(
    logits_RV: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    state: SamplingState,
    tokens_R: Tensor,
    *,
    bitmask_RW: Tensor | None = None,
    num_rows_1: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """See the folder's docstring. Reads the device, so it cannot be captured."""
    num_rows = len(logits_RV) if num_rows_1 is None else min(int(num_rows_1), len(logits_RV))
    rows = [row for row in range(num_rows) if int(slots_R[row]) >= 0]
    if not rows:
        return
    slots = slots_R[rows].long()
    indices = positions_R[rows].long() - state.ints_S[slots, 3]
    raw = logits_RV[rows]
    allowed = None if bitmask_RW is None else _unpack(bitmask_RW[rows], raw.shape[1])
    adjusted = torch.stack(
        [
            adjust(logits_V, state, int(slot), int(index), None if allowed is None else allowed[row])
            for row, (logits_V, slot, index) in enumerate(zip(raw, slots, indices, strict=True))
        ]
    )
    is_good = (raw < torch.inf).all(dim=1) & (adjusted > -torch.inf).any(dim=1)
    drawn = torch.where(is_good, _choose(adjusted, state, slots, indices), -1)
    tokens_R[rows] = drawn.int()
    _count(state, slots, drawn)


def adjust(logits_V: Tensor, state: SamplingState, slot: int, index: int, allowed_V: Tensor | None) -> Tensor:
    """One row after bias, penalties, held-back ends and mask."""
    size = len(logits_V)
    _, _, _, _, min_new, num_ends, num_biases, flags = state.ints_S[slot, :8].tolist()
    adjusted = logits_V.clone()
    ids = state.bias_ids_SN[slot, :num_biases].long()
    adjusted.index_add_(0, ids[ids < size], state.bias_values_SN[slot, :num_biases][ids < size])
    if flags & IS_PENALISED:
        adjusted = _penalise(adjusted, state, slot)
    if index < min_new:
        ends = state.end_ids_SE[slot, :num_ends].long()
        adjusted[ends[ends < size]] = -torch.inf
    if flags & IS_MASKED and allowed_V is not None:
        adjusted[~allowed_V] = -torch.inf
    return adjusted


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural-log probabilities by the model alone: of the tokens (R,), and ids and values (R, num_top) of the best.

    A negative token has NaN. Needs a copy of the logits while it runs.
    """
    totals_R1 = logits_RV.float().logsumexp(dim=1, keepdim=True)
    chosen = logits_RV.gather(1, tokens_R.clamp(min=0).long()[:, None]).float() - totals_R1
    best = logits_RV.topk(num_top, dim=1)
    chosen_R = torch.where(tokens_R < 0, torch.nan, chosen[:, 0])
    return chosen_R, best.indices.int(), best.values.float() - totals_R1


def id_logprobs(logits_RV: Tensor, ids_RN: Tensor) -> Tensor:
    """Natural-log probabilities (R, N) of each row's own ids, by the model alone."""
    return logits_RV.gather(1, ids_RN.long()).float() - logits_RV.float().logsumexp(dim=1, keepdim=True)


def logprobs(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """Natural-log probabilities (R,) of the tokens by the model alone; NaN for a negative token."""
    return token_logprobs(logits_RV, tokens_R, 0)[0]


def noise(seeds: Tensor, indices: Tensor, size: int) -> Tensor:
    """(R, size) float32: minus the base-2 logarithm of a standard exponential for every token of every row.

    `seeds` (R,) int64, of which the low and the high 32 bits count. The hash is a multiply-xorshift permutation of 32
    bits (the constants are those of Wellons' search for low bias) with a second key between its rounds.
    """
    low, high, index = seeds & WORD, (seeds >> 32) & WORD, indices & WORD
    first = _mix(_mix(_mix(low ^ 0x2545F491) ^ high) ^ index)
    second = _mix(_mix(_mix(high ^ 0x68E31DA4) + low & WORD) + index & WORD)
    bits = torch.arange(size, device=seeds.device) * 0x9E3779B1 + first[:, None] & WORD
    bits = bits ^ bits >> 16
    bits = bits * 0x7FEB352D & WORD
    bits = bits ^ bits >> 15 ^ second[:, None]
    bits = bits * 0x846CA68B & WORD
    bits = bits ^ bits >> 16
    point = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=LARGEST_BELOW_ONE)
    series = point * (1 + point * (1 / 2 + point * (1 / 3 + point * (1 / 4))))
    wait = torch.where(point < SMALL, series, (1 - point).log2() * (-1 / LOG2_E))
    return -wait.log2()


def _mix(bits: Tensor) -> Tensor:
    bits = bits ^ bits >> 16
    bits = bits * 0x7FEB352D & WORD
    bits = bits ^ bits >> 15
    bits = bits * 0x846CA68B & WORD
    return bits ^ bits >> 16


def _unpack(bitmask_RW: Tensor, size: int) -> Tensor:
    bits = bitmask_RW[:, :, None] >> torch.arange(32, device=bitmask_RW.device) & 1
    return bits.flatten(1)[:, :size] != 0


def _penalise(logits_V: Tensor, state: SamplingState, slot: int) -> Tensor:
    """Repetition (Keskar et al., arXiv 1909.05858) looks at prompt and output, the others at output."""
    counts_V = state.counts_SV[slot, : len(logits_V)].int()
    repetition, frequency, presence = state.floats_S[slot, 3:6]
    generated = (counts_V & GENERATED_BITS).float()
    reduced = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    penalised = torch.where(counts_V != 0, reduced, logits_V)
    return penalised - frequency * generated - presence * generated.clamp(max=1)


def _choose(logits_RV: Tensor, state: SamplingState, slots: Tensor, indices: Tensor) -> Tensor:
    """Tokens for adjusted rows; of rows that are not finite something."""
    size = logits_RV.shape[1]
    temperature = state.floats_S[slots, 0:1]
    top_k, low, high = state.ints_S[slots, :3].long().T
    is_greedy = (temperature == 0) | (top_k == 1)[:, None]
    scale = LOG2_E / torch.where(is_greedy, 1.0, temperature)
    is_kept = _keep(logits_RV, scale, top_k, state.floats_S[slots, 1], state.floats_S[slots, 2])
    scores = logits_RV * scale + noise(low & WORD | high << 32, indices, size)
    scores = torch.where(is_greedy, logits_RV, torch.where(is_kept, scores, -torch.inf))
    ids = torch.arange(size, device=logits_RV.device)
    return torch.where(scores == scores.amax(dim=1, keepdim=True), ids, size).amin(dim=1)


def _keep(logits_RV: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens top-k, top-p and min-p leave."""
    values, ids = logits_RV.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    weights = ((values - values[:, :1]) * scale).exp2()
    is_kept = (ranks < top_k[:, None]) | (top_k <= 0)[:, None]
    masses = torch.where(is_kept, weights, 0.0).double()
    before = masses.cumsum(dim=1) - masses
    target = top_p[:, None] * masses.sum(dim=1, keepdim=True)
    is_kept &= (before < target) | (ranks == 0) | (top_p >= 1)[:, None]
    is_kept &= weights >= min_p[:, None]
    return torch.zeros_like(is_kept).scatter(1, ids, is_kept)


def _count(state: SamplingState, slots: Tensor, tokens: Tensor) -> None:
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        if token >= 0 and int(state.ints_S[slot, 7]) & IS_PENALISED:
            count = state.counts_SV[slot, token]
            count += (count & GENERATED_BITS) < GENERATED_BITS
