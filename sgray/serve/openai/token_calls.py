"""Texts to token ids and back, for whoever counts tokens before a call: the forms of SGLang and vLLM in one.

What becomes of messages is the service's to say, since it must be what a chat call makes of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from sgray.errors import InvalidRequestError
from sgray.serve.openai.forms import Json
from sgray.serve.openai.prompts import THREAD_CHARS, checked_ids
from sgray.serve.openai.schemas import DetokenizeBody, TokenizeBody
from sgray.serve.openai.validate import checked_text, parse_body, wrong_type, wrong_value
from sgray.text.token_ids import TextCodec

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def parse_tokenize(body: object) -> TokenizeBody:
    """A checked body: a prompt, or messages with what belongs to them."""
    given = parse_body(TokenizeBody, body)
    if (given.prompt is None) == (given.messages is None):
        raise InvalidRequestError("Give exactly one of 'prompt' and 'messages'.", param="prompt")
    for name in _OF_MESSAGES:
        if given.messages is None and getattr(given, name) is not None:
            wrong_value(name, name, "it belongs to messages, and none are given.")
    if given.messages is not None and given.add_special_tokens:
        reason = "the chat template writes the special tokens of messages itself."
        wrong_value("add_special_tokens", "add_special_tokens", reason)
    return given


def chat_fields(given: TokenizeBody, model: str) -> dict[str, Any]:
    """The body of the chat call whose prompt is asked for."""
    return {"model": model, "messages": given.messages, **{name: getattr(given, name) for name in _OF_MESSAGES}}


async def encode_prompt(given: TokenizeBody, tokenizer: TextCodec, max_batch: int) -> list[int] | list[list[int]]:
    """The ids of a text, or of each text of an array; an empty text has none but what the tokenizer adds."""
    prompt, is_special = given.prompt, given.add_special_tokens is not False
    if isinstance(prompt, str):
        return await _encode(tokenizer, checked_text("prompt", "prompt", prompt), is_special)
    texts = _array(prompt, "prompt", "a string or an array of strings", max_batch)
    for index, text in enumerate(texts):
        checked_text("prompt", f"prompt[{index}]", text)
    return [await _encode(tokenizer, text, is_special) for text in texts]


def tokens_json(tokens: list[int] | list[list[int]], max_length: int, text_of: Callable[[int], str] | None) -> Json:
    """The answer: ids, how many they are, how many fit the model, and the string of each id if `text_of` is given."""
    answer: Json = {"tokens": tokens, "count": _each(len, tokens), "max_model_len": max_length}
    if text_of is not None:
        answer["token_strs"] = _each(lambda ids: [text_of(token) for token in ids], tokens)
    return answer


def parse_detokenize(body: object, vocab_size: int, max_batch: int) -> DetokenizeBody:
    """A checked body: ids, or arrays of them."""
    given = parse_body(DetokenizeBody, body)
    tokens = given.tokens
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        _array(tokens, "tokens", "an array of arrays of token ids", max_batch)
        for index, ids in enumerate(tokens):
            _check_ids(ids, f"tokens[{index}]", vocab_size)
    else:
        _check_ids(tokens, "tokens", vocab_size)
    return given


async def decode_tokens(given: DetokenizeBody, tokenizer: TextCodec) -> Json:
    """The text of ids, or of each array of them: as `text` for SGLang's clients, as `prompt` for vLLM's."""
    decode = partial(tokenizer.decode, skip_special_tokens=given.skip_special_tokens)
    text = await asyncio.to_thread(_each, decode, given.tokens)
    return {"text": text, "prompt": text}


def _each(function: Callable[[list[int]], Any], tokens: list[Any]) -> Any:
    """The function's value for one list of ids, or the values for each of several."""
    return [function(ids) for ids in tokens] if tokens and isinstance(tokens[0], list) else function(tokens)


async def _encode(tokenizer: TextCodec, text: str, is_special: bool) -> list[int]:
    encode = partial(tokenizer.encode, text, add_special_tokens=is_special)
    return await asyncio.to_thread(encode) if len(text) > THREAD_CHARS else encode()


def _array(value: object, param: str, expected: str, max_batch: int) -> list[Any]:
    if not isinstance(value, list):
        wrong_type(param, param, expected, value)
    if not 0 < len(value) <= max_batch:
        wrong_value(param, param, f"an array of {len(value)}; 1 to {max_batch} are allowed.")
    return value


def _check_ids(value: object, place: str, vocab_size: int) -> None:
    if value != []:  # which is the text of no tokens
        checked_ids(value, "tokens", place, vocab_size)
