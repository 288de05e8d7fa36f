"""Prompts of text completions: a text, token ids, or an array of either, and how many tokens may follow."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sgray.errors import ContextLengthError
from sgray.serve.openai.validate import checked_text, kind, shown, wrong_type, wrong_value
from sgray.text.token_ids import TextCodec

THREAD_CHARS = 16_384  # about 3 ms of tokenising; longer texts leave the event loop


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that the engine gets, and the text that they came from, if they did."""

    tokens: list[int]
    text: str | None = None


def parse_prompts(value: object, *, param: str, vocab_size: int, max_batch: int) -> list[str | list[int]]:
    """The prompts of a call; raises InvalidRequestError that names the first wrong one.

    Texts and ids do not mix, and an array of integers is one prompt.
    """
    if isinstance(value, str):
        return [checked_text(param, param, value)]
    if not isinstance(value, list):
        wrong_type(param, param, "a string, an array of strings, an array of token ids or an array of those", value)
    if not value:
        wrong_value(param, param, "the array is empty.")
    if not isinstance(value[0], str | list):
        return [checked_ids(value, param, param, vocab_size)]
    if len(value) > max_batch:
        wrong_value(param, param, f"{len(value)} prompts in one call, at most {max_batch} are allowed.")
    if isinstance(value[0], str):
        return [checked_text(param, f"{param}[{index}]", item) for index, item in enumerate(value)]
    return [checked_ids(item, param, f"{param}[{index}]", vocab_size) for index, item in enumerate(value)]


def checked_ids(value: object, param: str, place: str, vocab_size: int) -> list[int]:
    """`value` as a non-empty list of ids in [0, vocab_size)."""
    if not isinstance(value, list):
        wrong_type(param, place, "an array of token ids", value)
    if not value:
        wrong_value(param, place, "a prompt needs at least one token.")
    for index, token in enumerate(value):
        if type(token) is not int:  # bool is an int to isinstance
            wrong_value(
                param, f"{place}[{index}]", f"expected an integer token id, but got {kind(token)}: {shown(token)}."
            )
        if not 0 <= token < vocab_size:
            wrong_value(param, f"{place}[{index}]", f"token id {shown(token)} is not in 0..{vocab_size - 1}.")
    return value


async def tokenise(tokenizer: TextCodec, prompt: str | list[int], *, param: str) -> Prompt:
    """The ids of a prompt; a long text is encoded in a thread, so that streams go on meanwhile."""
    if isinstance(prompt, list):
        return Prompt(prompt)
    if len(prompt) > THREAD_CHARS:
        tokens = await asyncio.to_thread(tokenizer.encode, prompt)
    else:
        tokens = tokenizer.encode(prompt)
    if not tokens:
        wrong_value(param, param, "the text has no tokens, and this model has no start token; give some text.")
    return Prompt(tokens, prompt)


def answer_tokens(num_prompt: int, asked: int | None, default: int | None, *, context_length: int, param: str) -> int:
    """How many tokens may be generated: as asked, else the default (None: all), within what the context leaves.

    Raises ContextLengthError with all numbers where the prompt, or the prompt and the tokens asked for, do not fit.
    """
    left = context_length - num_prompt
    if left < 0 or (left == 0 and asked != 0):
        raise ContextLengthError(
            f"This model's maximum context length is {context_length} tokens, but the prompt has {num_prompt} tokens, "
            "which leaves no room for an answer. Shorten the prompt.",
            param=param,
        )
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise ContextLengthError(
            f"This model's maximum context length is {context_length} tokens, but {shown(num_prompt + asked)} were "
            f"requested: {num_prompt} in the prompt and {shown(asked)} for the answer. Shorten the prompt or ask for "
            f"at most {left} tokens.",
            param=param,
        )
    return asked
