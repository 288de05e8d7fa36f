"""What sampling knows of every slot, in tables on the device, and how a sequence's wishes get there.

Nothing here reads the device: descriptions are made on the host and sent one way. Which sequence owns which slot is the
caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgray.protocol import MAX_END_IDS, MAX_LOGIT_BIASES, SamplingParams

NUM_FIELDS = 8  # columns of the tables of floats and integers
MIN_BLOCK = 1024  # the smallest part of a row that one program surveys
MAX_CANDIDATES = 2048  # tokens near the edge of a filter that fit one program
# Colder than this is the largest logit for every purpose, and would overflow.
MIN_TEMPERATURE = 1e-6

IS_MASKED = 1
IS_PENALISED = 2

GENERATED_BITS = 0x3FFF  # of an entry of the counts: how often the id was generated, saturating
PROMPT_BIT = 0x4000  # the id occurs in the prompt


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Tables indexed by slot, and memory for the rows of one step.

    `floats_S` (S, 8) float32: temperature, top_p, min_p, repetition, frequency, presence penalty, two unused.
    `ints_S` (S, 8) int32: top_k (0 or -1 for none), seed low and high word, num_prompt, min_new_tokens, number of end
    ids, number of biases, flags. `end_ids_SE`, `bias_ids_SN` int32 and `bias_values_SN` float32 are read as far as
    those numbers say. `counts_SV` int16 is read only for slots with a penalty.

    `adjusted_RV` float32 holds the rows that bias, penalties, ends or mask change; `scores_RN`, `ids_RN` and `tops_RN`
    the results of the parts of a row; `near_ids_RC` and `near_values_RC` the tokens near a filter's edge.
    """

    floats_S: Tensor
    ints_S: Tensor
    end_ids_SE: Tensor
    bias_ids_SN: Tensor
    bias_values_SN: Tensor
    counts_SV: Tensor
    adjusted_RV: Tensor
    scores_RN: Tensor
    ids_RN: Tensor
    tops_RN: Tensor
    near_ids_RC: Tensor
    near_values_RC: Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, vocab_size: int, device: torch.device, *, max_rows: int | None = None
    ) -> SamplingState:
        """Tables for `num_slots` slots, all greedy, and for steps of `max_rows` rows (as many as slots if None)."""
        rows = num_slots if max_rows is None else max_rows
        width = -(-vocab_size // 16) * 16  # rows begin on whole 16-byte words
        parts = -(-vocab_size // MIN_BLOCK)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            floats_S=zeros(num_slots, NUM_FIELDS, dtype=torch.float32),
            ints_S=zeros(num_slots, NUM_FIELDS, dtype=torch.int32),
            end_ids_SE=zeros(num_slots, MAX_END_IDS, dtype=torch.int32),
            bias_ids_SN=zeros(num_slots, MAX_LOGIT_BIASES, dtype=torch.int32),
            bias_values_SN=zeros(num_slots, MAX_LOGIT_BIASES, dtype=torch.float32),
            counts_SV=zeros(num_slots, width, dtype=torch.int16),
            adjusted_RV=zeros(rows, width, dtype=torch.float32),
            scores_RN=zeros(rows, parts, dtype=torch.float32),
            ids_RN=zeros(rows, parts, dtype=torch.int32),
            tops_RN=zeros(rows, parts, dtype=torch.float32),
            near_ids_RC=zeros(rows, MAX_CANDIDATES, dtype=torch.int32),
            near_values_RC=zeros(rows, MAX_CANDIDATES, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True)
class SlotDescription:
    """One sequence's wishes as arrays on the host.

    `words`: the floats' bits, the integers and the end ids, as they stand in the tables. `counted_ids` are different
    from each other; `counts` are their entries.
    """

    words: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    counted_ids: np.ndarray
    counts: np.ndarray
    is_penalised: bool


def describe(
    params: SamplingParams,
    *,
    seed: int,
    num_prompt: int,
    end_ids: Sequence[int],
    tokens: Sequence[int],
    is_masked: bool = False,
) -> SlotDescription:
    """A sequence's wishes; its first `num_prompt` tokens are the prompt, the others were generated already.

    The limits of `protocol` hold: whoever took the request has seen to it.
    """
    assert len(params.logit_bias) <= MAX_LOGIT_BIASES and len(set(end_ids)) <= MAX_END_IDS
    is_penalised = _has_penalty(params)
    flags = IS_MASKED * is_masked + IS_PENALISED * is_penalised
    ends = sorted(set(end_ids))
    counted_ids, counts = _count(tokens, num_prompt) if is_penalised else _count((), 0)
    floats = np.array(_floats(params), dtype=np.float32)
    ints = np.array([*_ints(params, seed, num_prompt), len(ends), len(params.logit_bias), flags], dtype=np.int64)
    padded_ends = np.array(ends + [0] * (MAX_END_IDS - len(ends)), dtype=np.int32)
    return SlotDescription(
        words=np.concatenate([floats.view(np.int32), ints.astype(np.uint32).view(np.int32), padded_ends]),
        bias_ids=np.array(list(params.logit_bias), dtype=np.int32),
        bias_values=np.array(list(params.logit_bias.values()), dtype=np.float32),
        counted_ids=counted_ids,
        counts=counts,
        is_penalised=is_penalised,
    )


def store(state: SamplingState, descriptions: Sequence[SlotDescription], slots: Sequence[int]) -> None:
    """Writes each description to its slot. On a GPU everything is queued on the current stream; nothing waits.

    A slot without a penalty keeps stale counts, which nobody reads.
    """
    if not descriptions:
        return
    index = np.array(slots, dtype=np.int32)[:, None]
    words = _send(np.concatenate([np.stack([one.words for one in descriptions]), index], axis=1), state.ints_S.device)
    where = words[:, -1].long()
    state.floats_S.index_copy_(0, where, words[:, :NUM_FIELDS].view(torch.float32))
    state.ints_S.index_copy_(0, where, words[:, NUM_FIELDS : 2 * NUM_FIELDS])
    state.end_ids_SE.index_copy_(0, where, words[:, 2 * NUM_FIELDS : -1])
    for description, slot in zip(descriptions, slots, strict=True):
        _store_lists(state, description, slot)


def _store_lists(state: SamplingState, description: SlotDescription, slot: int) -> None:
    """The parts that few sequences have."""
    device = state.ints_S.device
    num_biases = len(description.bias_ids)
    if num_biases:
        state.bias_ids_SN[slot, :num_biases] = _send(description.bias_ids, device)
        state.bias_values_SN[slot, :num_biases] = _send(description.bias_values, device)
    if description.is_penalised:
        counts_V = state.counts_SV[slot]
        counts_V.zero_()
        counts_V.index_copy_(0, _send(description.counted_ids, device), _send(description.counts, device))


def _send(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device. The pinned original is kept by torch's host allocator until the copy is done."""
    tensor = torch.from_numpy(values)
    return tensor.clone() if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _floats(params: SamplingParams) -> list[float]:
    temperature = params.temperature and max(params.temperature, MIN_TEMPERATURE)
    penalties = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    return [temperature, params.top_p, params.min_p, *penalties, 0.0, 0.0]


def _ints(params: SamplingParams, seed: int, num_prompt: int) -> list[int]:
    top_k = min(max(params.top_k, 0), 2**31 - 1)
    return [top_k, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, num_prompt, min(params.min_new_tokens, 2**31 - 1)]


def _count(tokens: Sequence[int], num_prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """The different ids among `tokens` and their entries in the table of counts."""
    ids, inverse = np.unique(np.array(tokens, dtype=np.int64), return_inverse=True)
    generated = np.bincount(inverse[num_prompt:], minlength=len(ids)).clip(max=GENERATED_BITS)
    in_prompt = np.bincount(inverse[:num_prompt], minlength=len(ids)) > 0
    return ids, (generated + PROMPT_BIT * in_prompt).astype(np.int16)
