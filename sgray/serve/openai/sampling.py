"""The sampling fields of a body as `SamplingParams` and as what is done with the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgray.protocol import MAX_END_IDS, MAX_LOGIT_BIASES, SamplingParams
from sgray.serve.openai.schemas import INT64, Sampling
from sgray.serve.openai.validate import checked_text, kind, shown, wrong_type, wrong_value

_GREEDY_BELOW = 1e-4  # dividing logits by less only overflows; the best token has all the mass long before


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What happens to generated text: where it is cut, and what is left out."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that bodies are checked against."""

    vocab_size: int
    context_length: int
    max_n: int
    max_batch: int
    max_stop: int
    max_stop_chars: int
    num_end_ids: int


def sampling_params(body: Sampling, limits: Limits, *, prefix: str = "") -> SamplingParams:
    """How tokens are drawn; counts of tokens, the seed and logprobs are the caller's to set.

    `prefix` stands before the names of fields in errors.
    """
    return SamplingParams(
        temperature=_temperature(body.temperature),
        top_k=_top_k(body.top_k, body.top_p, limits.vocab_size),
        top_p=body.top_p or 1.0,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=_logit_bias(body.logit_bias, f"{prefix}logit_bias", limits.vocab_size),
        stop_token_ids=_stop_token_ids(body.stop_token_ids, f"{prefix}stop_token_ids", limits),
        ignore_eos=body.ignore_eos,
    )


def stop_strings(value: object, param: str, limits: Limits) -> tuple[str, ...]:
    """Stop strings from a string, an array of strings or nothing."""
    if value is None:
        return ()
    if not isinstance(value, str | list):
        wrong_type(param, param, "a string or an array of strings", value)
    items = [value] if isinstance(value, str) else value
    if len(items) > limits.max_stop:
        wrong_value(param, param, f"{len(items)} stop strings, at most {limits.max_stop} are allowed.")
    for index, item in enumerate(items):
        place = param if isinstance(value, str) else f"{param}[{index}]"
        if not checked_text(param, place, item):
            wrong_value(param, place, "a stop string may not be empty.")
        if len(item) > (most := limits.max_stop_chars):
            wrong_value(param, place, f"a stop string has at most {most} characters, this one {len(item)}.")
    return tuple(items)


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one choice: its own for each, in [0, 2**63), also where the sum or the given seed is outside."""
    return None if seed is None else (seed + choice) % INT64


def checked_n(n: int, num_prompts: int, limits: Limits, param: str) -> int:
    """`n` within the limits; n times the prompts is bounded too, because each is a request."""
    if n > limits.max_n:
        wrong_value(param, param, f"{shown(n)} is above the maximum of {limits.max_n}.")
    most = max(limits.max_n, limits.max_batch)
    if n * num_prompts > most:
        wrong_value(param, param, f"{num_prompts} prompts times n = {n} are more than the {most} answers allowed.")
    return n


def _temperature(value: float) -> float:
    return 0.0 if value < _GREEDY_BELOW else value


def _top_k(top_k: int, top_p: float, vocab_size: int) -> int:
    """0 for no limit. A nucleus of mass 0 still holds the best token, and that alone."""
    if top_p == 0:
        return 1
    return top_k if 0 < top_k < vocab_size else 0


def _logit_bias(value: Mapping[Any, Any], param: str, vocab_size: int) -> dict[int, float]:
    """Biases by token id; JSON has only string keys, Python callers may use integers."""
    if len(value) > MAX_LOGIT_BIASES:
        wrong_value(param, param, f"{len(value)} entries, at most {MAX_LOGIT_BIASES} are allowed.")
    return {_bias_token(key, param, vocab_size): _bias(key, bias, param) for key, bias in value.items()}


def _bias_token(key: object, param: str, vocab_size: int) -> int:
    text = str(key)
    token = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= token < vocab_size:
        wrong_value(param, param, f"{shown(key)} is not a token id in 0..{vocab_size - 1}.")
    return token


def _bias(key: object, bias: object, param: str) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        wrong_value(param, param, f"the bias of token {shown(key)} must be a number, but it is {kind(bias)}.")
    if not -100 <= bias <= 100:
        wrong_value(param, param, f"the bias of token {shown(key)} must be in [-100, 100], but it is {shown(bias)}.")
    return float(bias)


def _stop_token_ids(value: list[int], param: str, limits: Limits) -> tuple[int, ...]:
    """Each id once; the engine has room for so many, the model's own end ids among them."""
    tokens = tuple(dict.fromkeys(value))
    if len(tokens) > (most := MAX_END_IDS - limits.num_end_ids):
        wrong_value(param, param, f"{len(tokens)} stop tokens, at most {most} are allowed.")
    for token in tokens:
        if not 0 <= token < limits.vocab_size:
            wrong_value(param, param, f"token id {shown(token)} is not in 0..{limits.vocab_size - 1}.")
    return tokens
