"""The fields of the native form, which may hold one value for all prompts or an array of one a prompt.

What is read here is plain: which values belong to which prompt, and how its answers are called.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from sgray.errors import InvalidRequestError
from sgray.protocol import MAX_LOGPROB_IDS, NO_LOGPROBS, SamplingParams
from sgray.serve.openai.prompts import Prompt, answer_tokens, checked_ids
from sgray.serve.openai.sampling import Limits, sampling_params
from sgray.serve.openai.schemas import (
    MAX_TOP_LOGPROBS,
    NATIVE_SAMPLING_UNSUPPORTED,
    NATIVE_UNSUPPORTED,
    NativeBody,
    NativeSampling,
)
from sgray.serve.openai.validate import (
    checked_text,
    kind,
    parse_body,
    shown,
    without_unsupported,
    wrong_type,
    wrong_value,
)

MAX_RID_CHARS = 256

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class LogprobAsk:
    """What one prompt's caller wants of logprobs. `start` is the first prompt token that gets one, None for none.

    `ids` are the ids whose logprobs are wanted at every position.
    """

    is_asked: bool
    start: int | None
    num_top: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """How answers are called, in the order of prompts and choices. `is_given`: by the caller."""

    call: str
    answers: list[str]
    is_given: bool


def parse_native(body: object) -> NativeBody:
    """A checked body with exactly one kind of prompt."""
    native = parse_body(NativeBody, without_unsupported(body, NATIVE_UNSUPPORTED))
    if (native.text is None) == (native.input_ids is None):
        raise InvalidRequestError("Give exactly one of 'text' and 'input_ids'.", param="text")
    checked_text("cache_salt", "cache_salt", native.cache_salt)
    return native


def is_list_of_prompts(value: object) -> bool:
    """Whether this is an array of prompts and not one of token ids."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


def parse_sampling(native: NativeBody, num_prompts: int | None) -> list[NativeSampling]:
    """The sampling of each prompt; `num_prompts` None is a single one. All must agree on n."""

    def read(value: object, place: str) -> NativeSampling:
        supported = without_unsupported(value, NATIVE_SAMPLING_UNSUPPORTED, within=place)
        return parse_body(NativeSampling, supported, within=place)

    value = {} if native.sampling_params is None else native.sampling_params
    given = _spread(value, "sampling_params", num_prompts, read)
    if any(one.n != given[0].n for one in given):
        wrong_value("sampling_params", "sampling_params", "n must be the same for all prompts of a call.")
    return given


def parse_logprobs(
    native: NativeBody, given: list[NativeSampling], num_prompts: int | None, lengths: list[int], vocab_size: int
) -> list[LogprobAsk]:
    """What is asked of logprobs, for each prompt; `given` and `lengths` (in tokens) are the prompts'."""

    def top(value: object, place: str) -> int:
        return _whole(value, "top_logprobs_num", place, 0, MAX_TOP_LOGPROBS)

    def start(value: object, place: str) -> int | None:
        return None if value is None else _whole(value, "logprob_start_len", place, -1, max(lengths))

    asked = _spread(native.return_logprob, "return_logprob", num_prompts, _flag)
    tops = _spread(native.top_logprobs_num, "top_logprobs_num", num_prompts, top)
    chosen = _spread(native.logprob_start_len, "logprob_start_len", num_prompts, start)
    unset = [-1 if one.max_new_tokens else 0 for one in given]
    starts = [other if first is None else first for first, other in zip(chosen, unset, strict=True)]
    ids = _spread_ids(native.token_ids_logprob, num_prompts, vocab_size)
    for position, (first, length) in enumerate(zip(starts, lengths, strict=True)):
        if first > length:
            reason = f"{first} is beyond the {length} tokens of prompt {position}."
            wrong_value("logprob_start_len", "logprob_start_len", reason)
    return [
        LogprobAsk(True, first if first >= 0 else None, num_top, own) if is_asked else LogprobAsk(False, None, 0)
        for is_asked, first, num_top, own in zip(asked, starts, tops, ids, strict=True)
    ]


def native_sampling(
    given: NativeSampling, ask: LogprobAsk, prompt: Prompt, limits: Limits, param: str
) -> SamplingParams:
    """How the tokens of one prompt's answers are drawn; `param` is the field that the prompt stands in."""
    prefix, length = "sampling_params.", len(prompt.tokens)
    if given.min_new_tokens > given.max_new_tokens:
        reason = f"{shown(given.min_new_tokens)} is above max_new_tokens, {shown(given.max_new_tokens)}."
        wrong_value(f"{prefix}min_new_tokens", f"{prefix}min_new_tokens", reason)
    has_prompt = ask.start is not None and ask.start < length
    return replace(
        sampling_params(given, limits, prefix=prefix),
        seed=given.sampling_seed,
        min_new_tokens=given.min_new_tokens,
        max_new_tokens=answer_tokens(
            length, given.max_new_tokens, None, context_length=limits.context_length, param=param
        ),
        logprobs=ask.num_top if ask.is_asked else NO_LOGPROBS,
        prompt_logprobs=ask.num_top if has_prompt else NO_LOGPROBS,
        prompt_logprobs_start=ask.start or 0 if has_prompt else 0,
        logprob_ids=ask.ids,
    )


def name_answers(rid: object, num_prompts: int | None, n: int) -> Names:
    """The names of a call's answers, after the caller's `rid` or a new one.

    `rid` alone for a single answer; else `rid_0`, `rid_1`, ... for prompts, and so again for choices.
    """
    call = uuid.uuid4().hex
    if rid is None:
        count = n * (num_prompts or 1)
        is_single = num_prompts is None and n == 1
        return Names(call, [call] if is_single else [f"{call}-{index}" for index in range(count)], is_given=False)
    if num_prompts is None or isinstance(rid, list):
        names = _spread(rid, "rid", num_prompts, _rid)
    else:
        names = [f"{_rid(rid, 'rid')}_{index}" for index in range(num_prompts)]
    if len(set(names)) < len(names):
        wrong_value("rid", "rid", "each prompt needs a name of its own.")
    if n > 1:
        names = [f"{name}_{choice}" for name in names for choice in range(n)]
    return Names(call, names, is_given=True)


def parse_programs(native: NativeBody, num_prompts: int | None) -> list[str]:
    """The program of each prompt; empty for none."""
    return _spread(native.program_id, "program_id", num_prompts, _program)


def _spread(value: object, param: str, num_prompts: int | None, read: Callable[[object, str], ValueT]) -> list[ValueT]:
    """One checked value a prompt, from one for all or from an array of them."""
    if num_prompts is None or not isinstance(value, list):
        return [read(value, param)] * (num_prompts or 1)
    if len(value) != num_prompts:
        wrong_value(
            param, param, f"an array of {len(value)} for {num_prompts} prompts; give one for each, or one value."
        )
    return [read(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _spread_ids(value: object, num_prompts: int | None, vocab_size: int) -> list[tuple[int, ...]]:
    """The ids of each prompt: one array for all, or an array of arrays; null or an empty one asks for none."""

    def read(value: object, place: str) -> tuple[int, ...]:
        if value is None or value == []:
            return ()
        ids = checked_ids(value, "token_ids_logprob", place, vocab_size)
        if len(ids) > MAX_LOGPROB_IDS:
            wrong_value("token_ids_logprob", place, f"{len(ids)} ids, at most {MAX_LOGPROB_IDS} are allowed.")
        return tuple(ids)

    if isinstance(value, list) and any(item is None or isinstance(item, list) for item in value):
        return _spread(value, "token_ids_logprob", num_prompts, read)
    return [read(value, "token_ids_logprob")] * (num_prompts or 1)


def _flag(value: object, place: str) -> bool:
    if not isinstance(value, bool):
        wrong_type(place.partition("[")[0], place, "a boolean", value)
    return value


def _whole(value: object, param: str, place: str, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"Invalid type for '{place}': expected an integer, but got {kind(value)} instead.",
            param=param,
            code="invalid_type",
        )
    if not lowest <= value <= highest:
        wrong_value(param, place, f"{shown(value)} is not in {lowest}..{highest}.")
    return value


def _program(value: object, place: str) -> str:
    return _name("program_id", place, value, 0)


def _rid(value: object, place: str) -> str:
    return _name("rid", place, value, 1)


def _name(param: str, place: str, value: object, fewest: int) -> str:
    name = checked_text(param, place, value)
    if not fewest <= len(name) <= MAX_RID_CHARS:
        wrong_value(param, place, f"a name has {fewest} to {MAX_RID_CHARS} characters, this one {len(name)}.")
    return name
