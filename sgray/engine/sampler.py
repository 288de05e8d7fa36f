"""Logits to tokens. Each row is drawn by its own sequence's wishes and by nothing of its batch-mates.

The draw of one token is fixed by (seed, index of the generated token): one uniform number from a keyed hash, looked up
in the row's cumulative distribution. So no generator state exists, and a sequence that is moved or computed again
draws the same tokens.

Order of the steps, as in transformers: logit bias, penalties, end ids held back, mask, temperature, top-k, top-p (over
what top-k left), min-p. Log-probabilities are of the model's own distribution, before all of these, as OpenAI and vLLM
give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sgray.protocol import NO_LOGPROBS, SamplingParams, TokenLogprobs

# Sorting a whole vocabulary costs milliseconds a row; top-p nearly always ends within this many tokens.
FEW_CANDIDATES = 256
# The largest piece of logits that prompt log-probabilities hold at once.
MAX_LOGITS_BYTES = 64 * 2**20


@dataclass(slots=True)
class Counts:
    """What a sequence's penalties look at: which ids occur anywhere, and how often each was generated."""

    is_seen: Tensor
    generated: Tensor

    @classmethod
    def of(cls, tokens: list[int], num_prompt: int, vocab_size: int, device: torch.device) -> Counts:
        """The counts of a sequence whose first `num_prompt` tokens are its prompt."""
        is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        is_seen[torch.tensor(tokens, dtype=torch.int64, device=device)] = True
        generated = torch.tensor(tokens[num_prompt:], dtype=torch.int64, device=device)
        return cls(is_seen, torch.bincount(generated, minlength=vocab_size).float())

    def add(self, token: int) -> None:
        """Counts one more generated token."""
        self.is_seen[token] = True
        self.generated[token] += 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One row's wishes: the sequence's parameters and seed, and which of its generated tokens this is.

    `counts` is set where the parameters have a penalty; `end_ids` are held back while `index < min_new_tokens`. `mask`
    leaves, if it is set, the ids whose bits are set, as in a `StepPlan`.
    """

    params: SamplingParams
    seed: int
    index: int
    end_ids: tuple[int, ...] = ()
    counts: Counts | None = None
    mask: bytes | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens (-1 where a row failed), log-probabilities where asked for, and messages of failed rows."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)


def sample(logits_RV: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    """Draws a token for each row; `logits_RV` is not modified. Rows whose logits are not finite fail alone."""
    best = logits_RV.max(dim=-1)
    tokens: list[int] = best.indices.tolist()
    # The largest of a row that holds a NaN is NaN, and of a row without any finite number it is infinite.
    errors = {
        index: "the model's scores are not finite numbers"
        for index, is_finite in enumerate(best.values.isfinite().tolist())
        if not is_finite
    }
    special = [index for index, row in enumerate(rows) if not _is_plain_greedy(row) and index not in errors]
    if special:
        drawn = _draw(logits_RV[special].float(), [rows[index] for index in special])
        for index, token in zip(special, drawn, strict=True):
            tokens[index] = token
    for index in errors:
        tokens[index] = -1
    return Sampled(tokens, _logprobs(logits_RV, rows, tokens), errors)


def has_penalty(params: SamplingParams) -> bool:
    """Whether the parameters look at earlier tokens."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def adjust(logits_V: Tensor, row: RowSampling) -> None:
    """Applies bias, penalties, held-back ends and the mask to one row of float32 logits, in place."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
    if row.counts is not None:
        _penalise(logits_V, params, row.counts)
    if row.index < params.min_new_tokens and row.end_ids:
        logits_V[torch.tensor(row.end_ids, device=logits_V.device)] = float("-inf")
    if row.mask is not None:
        logits_V.masked_fill_(_is_barred(row.mask, len(logits_V)).to(logits_V.device), float("-inf"))


def uniform(seed: int, index: int) -> float:
    """A number in (0, 1) that depends on nothing but its arguments, on every machine."""
    key = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8, person=b"sgray-sampler").digest()
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52


def token_logprobs(
    logits_RV: Tensor, targets: Sequence[int], num_top: Sequence[int], ids: Sequence[Sequence[int]]
) -> list[TokenLogprobs]:
    """The log-probability of one target a row, with each row's own number of best alternatives and its own `ids`."""
    logprobs = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(targets, device=logprobs.device)[:, None])[:, 0].tolist()
    of_ids = [values_V[list(own)].tolist() if own else [] for values_V, own in zip(logprobs, ids, strict=True)]
    most = min(max(num_top), logprobs.shape[1])
    if most == 0:
        return [TokenLogprobs(value, [], own) for value, own in zip(chosen, of_ids, strict=True)]
    best = logprobs.topk(most, dim=-1)
    pairs = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [
        TokenLogprobs(value, top[:count], own)
        for value, top, count, own in zip(chosen, pairs, num_top, of_ids, strict=True)
    ]


def rows_at_once(vocab_size: int) -> int:
    """How many rows of float32 logits fit `MAX_LOGITS_BYTES`; at least one."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


def _is_barred(mask: bytes, vocab_size: int) -> Tensor:
    """True where an id may not be drawn."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits) == 0


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.top_k == 1


def _is_plain_greedy(row: RowSampling) -> bool:
    """Whether the largest logit is the answer as it stands."""
    params = row.params
    is_held = bool(row.end_ids) and row.index < params.min_new_tokens
    return _is_greedy(params) and not params.logit_bias and row.counts is None and not is_held and row.mask is None


def _penalise(logits_V: Tensor, params: SamplingParams, counts: Counts) -> None:
    """Repetition looks at prompt and output, once an id (Keskar et al., arXiv 1909.05858); the others at output."""
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        reduced = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
        torch.where(counts.is_seen, reduced, logits_V, out=logits_V)
    if params.frequency_penalty != 0:
        logits_V.sub_(counts.generated, alpha=params.frequency_penalty)
    if params.presence_penalty != 0:
        logits_V.sub_(counts.generated.clamp(max=1), alpha=params.presence_penalty)


def _draw(logits_RV: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """Tokens for rows of float32 logits, which it modifies."""
    for logits_V, row in zip(logits_RV, rows, strict=True):
        adjust(logits_V, row)
    return [
        int(logits_V.argmax()) if _is_greedy(row.params) else _draw_one(logits_V, row)
        for logits_V, row in zip(logits_RV, rows, strict=True)
    ]


def _draw_one(logits_V: Tensor, row: RowSampling) -> int:
    params = row.params
    scaled = (logits_V - logits_V.max()) / params.temperature
    weights = torch.softmax(scaled, dim=-1)
    if 0 < params.top_k < len(weights) or params.top_p < 1:
        weights, ids = _best(weights, params)
    else:
        ids = None
    if params.min_p > 0:
        weights = torch.where(weights < params.min_p * weights.max(), 0.0, weights)
    place = _look_up(weights, uniform(row.seed, row.index))
    return place if ids is None else int(ids[place])


def _best(weights_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Weights and ids that top-k and top-p leave, best first."""
    size = len(weights_V)
    top_k = params.top_k if 0 < params.top_k < size else size
    weights, ids = weights_V.topk(min(top_k, FEW_CANDIDATES, size))
    total = 1.0
    if top_k > len(weights) and (params.top_p >= 1 or top_k < size or float(weights.sum()) < params.top_p):
        weights, ids = weights_V.topk(top_k)
    if top_k < size:
        total = float(weights.sum())
    if params.top_p < 1:
        before = weights.cumsum(0) - weights
        num_kept = max(1, int((before < params.top_p * total).sum()))
        weights, ids = weights[:num_kept], ids[:num_kept]
    return weights, ids


def _look_up(weights: Tensor, point: float) -> int:
    """The index whose share of the summed weights holds `point`; never one without weight."""
    sums = weights.cumsum(0, dtype=torch.float64)
    target = point * float(sums[-1])
    place = int(torch.searchsorted(sums, torch.tensor([target], dtype=torch.float64, device=sums.device), right=True))
    return min(place, int((sums < sums[-1]).sum()))


def _logprobs(logits_RV: Tensor, rows: Sequence[RowSampling], tokens: Sequence[int]) -> list[TokenLogprobs | None]:
    asking = [i for i, row in enumerate(rows) if row.params.logprobs != NO_LOGPROBS and tokens[i] >= 0]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if asking:
        chosen = [tokens[i] for i in asking]
        num_top, ids = [rows[i].params.logprobs for i in asking], [rows[i].params.logprob_ids for i in asking]
        found = token_logprobs(logits_RV[asking], chosen, num_top, ids)
        for i, logprobs in zip(asking, found, strict=True):
            result[i] = logprobs
    return result
