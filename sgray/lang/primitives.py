"""The words of the language: functions that make expressions. They check what can be checked while a program is read.

Signatures are SGLang's, so that its programs run unchanged; `max_new_tokens` is accepted beside `max_tokens`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from sgray.lang.choices import ChoicesMethod, token_length_normalized
from sgray.lang.errors import UnavailableError
from sgray.lang.expressions import (
    DType,
    Expression,
    Gen,
    RoleBegin,
    RoleEnd,
    Sampling,
    Select,
    SeparateReasoning,
    Sequel,
    as_expression,
)

Schema = str | Mapping[str, Any] | type[BaseModel]

_PATTERNS: tuple[tuple[DType, str], ...] = (
    (bool, r"(True|False)"),
    (int, r"[-+]?[0-9]{1,18}"),
    (float, r"[-+]?[0-9]{1,18}(\.[0-9]{1,18})?"),
    (str, r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'),
)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: DType | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: Schema | None = None,
    *,
    max_new_tokens: int | None = None,
    ebnf: str | None = None,
) -> Expression:
    """Text that the model writes here; `choices` makes it a `select`.

    `dtype` (int, float, bool, str) binds the text to that form, and the variable holds the value. `json_schema` is a
    schema, its JSON, or a pydantic model. Raises ValueError for a pattern or a schema that is none.
    """
    if choices is not None:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method)
    kind, form = _form(dtype, regex, json_schema, ebnf)
    sampling = Sampling(
        max_new_tokens=_one_limit(max_tokens, max_new_tokens),
        min_new_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        **form,
    )
    return Gen(name, sampling, kind)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expression:
    """A whole number; options are those of `gen` that do not set another form."""
    return _typed(int, name, max_tokens, options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Expression:
    """A string in quotes; options are those of `gen` that do not set another form."""
    return _typed(str, name, max_tokens, options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Expression:
    """The likeliest of `choices`. Raises ValueError where there is none, or an empty one, or a temperature."""
    if isinstance(choices, str) or not choices:
        raise ValueError("select needs choices: a list of at least one text")
    for choice in choices:
        if choice == "" or not isinstance(choice, str):
            raise ValueError(f"a choice is a text with at least one character, but got {choice!r}")
    if temperature > 1e-5:
        raise ValueError(f"select takes the likeliest choice, so its temperature is 0, not {temperature:g}")
    return Select(name, tuple(choices), choices_method or token_length_normalized)


def system(expr: Expression | str | None = None) -> Expression:
    """A message of the system, or, without `expr`, its beginning."""
    return _message("system", expr)


def user(expr: Expression | str | None = None) -> Expression:
    """A message of the user, or, without `expr`, its beginning."""
    return _message("user", expr)


def assistant(expr: Expression | str | None = None) -> Expression:
    """A message of the assistant, or, without `expr`, its beginning."""
    return _message("assistant", expr)


def system_begin() -> Expression:
    """The beginning of a message of the system."""
    return RoleBegin("system")


def system_end() -> Expression:
    """The end of a message of the system."""
    return RoleEnd("system")


def user_begin() -> Expression:
    """The beginning of a message of the user."""
    return RoleBegin("user")


def user_end() -> Expression:
    """The end of a message of the user."""
    return RoleEnd("user")


def assistant_begin() -> Expression:
    """The beginning of a message of the assistant."""
    return RoleBegin("assistant")


def assistant_end() -> Expression:
    """The end of a message of the assistant."""
    return RoleEnd("assistant")


def separate_reasoning(expr: Expression, model_type: str = "qwen3") -> Expression:
    """`expr` with the reasoning of its texts in `<name>_reasoning_content`, apart from the answer in `<name>`."""
    from sgray.text.reasoning import REASONING_FORMATS

    if model_type not in REASONING_FORMATS:
        raise ValueError(f"model_type {model_type!r} is not one of {', '.join(REASONING_FORMATS)}")
    return SeparateReasoning(as_expression(expr), model_type)


def image(expr: object) -> Expression:
    """Always raises UnavailableError."""
    raise UnavailableError("images cannot be read: the models served here read text alone")


def video(path: object, num_frames: int) -> Expression:
    """Always raises UnavailableError."""
    raise UnavailableError("videos cannot be read: the models served here read text alone")


def value_of(text: str, dtype: DType | None) -> Any:
    """What a generated text stands for; the text itself where it is cut short of a value."""
    text = text.strip()
    try:
        if dtype is bool:
            return {"True": True, "False": False}[text]
        return json.loads(text) if dtype is str else text if dtype is None else dtype(text)
    except (ValueError, KeyError):
        return text


def _typed(kind: DType, name: str | None, max_tokens: int | None, options: Mapping[str, Any]) -> Expression:
    for word in ("dtype", "choices", "choices_method", "regex", "json_schema", "ebnf"):
        if word in options:
            raise TypeError(f"gen_{'int' if kind is int else 'string'} has a form of its own and takes no {word}")
    return gen(name, max_tokens, dtype=kind, **options)


def _message(role: str, expr: Expression | str | None) -> Expression:
    if expr is None:
        return RoleBegin(role)
    return Sequel((RoleBegin(role), *as_expression(expr).parts(), RoleEnd(role)))


def _one_limit(max_tokens: int | None, max_new_tokens: int | None) -> int | None:
    if max_tokens is not None and max_new_tokens not in (None, max_tokens):
        raise ValueError("max_tokens and max_new_tokens are two names of one limit; give one")
    return max_new_tokens if max_tokens is None else max_tokens


def _form(
    dtype: DType | str | None, regex: str | None, json_schema: Schema | None, ebnf: str | None
) -> tuple[DType | None, dict[str, str | None]]:
    """The type of the value, and what its text must match, by the name of the field that says so."""
    kind = _dtype(dtype)
    pattern = next((text for one, text in _PATTERNS if one is kind), None)
    if sum(value is not None for value in (pattern, regex, json_schema, ebnf)) > 1:
        raise ValueError("dtype, regex, json_schema and ebnf exclude each other")
    schema = None if json_schema is None else _schema_json(json_schema)
    return kind, {"regex": pattern or _checked_regex(regex), "json_schema": schema, "ebnf": ebnf}


def _dtype(value: DType | str | None) -> DType | None:
    for kind, _ in _PATTERNS:
        if value is kind or value == kind.__name__:
            return kind
    if value is None:
        return None
    raise ValueError(f"dtype is int, float, bool or str, not {value!r}")


def _checked_regex(regex: str | None) -> str | None:
    if regex is None:
        return None
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(f"regex {regex!r} is not a regular expression: {error}") from None
    return regex


def _schema_json(schema: Schema) -> str:
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json_schema is not JSON: {error}") from None
        return schema
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return json.dumps(schema.model_json_schema())
    if isinstance(schema, Mapping):
        return json.dumps(dict(schema))
    raise ValueError(f"json_schema is a schema, its JSON or a pydantic model, not {type(schema).__name__}")
