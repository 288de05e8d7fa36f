"""Scores of items by the probability of label tokens after them: SGLang's /v1/score.

The probability of a label is what a prompt that ends in it gets for its last token, so each pair of item and label is
one request without an answer; what its labels share of an item is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sgray.errors import ContextLengthError, EngineError
from sgray.protocol import SamplingParams
from sgray.serve.openai.choices import Choice
from sgray.serve.openai.forms import Json
from sgray.serve.openai.generation import Call, Generation
from sgray.serve.openai.prompts import Prompt, checked_ids, tokenise
from sgray.serve.openai.sampling import Limits, TextOptions
from sgray.serve.openai.schemas import ScoreBody
from sgray.serve.openai.validate import checked_text, wrong_type, wrong_value
from sgray.text.token_ids import TextCodec


async def score_prompts(body: ScoreBody, tokenizer: TextCodec, limits: Limits) -> list[list[int]]:
    """The ids of query and item together, for each item; texts are joined before they become ids."""
    items = [body.items] if isinstance(body.items, str) else body.items
    if not isinstance(items, list) or not items:
        wrong_type("items", "items", "a string, an array of strings or an array of arrays of token ids", body.items)
    labels, most = (
        checked_ids(body.label_token_ids, "label_token_ids", "label_token_ids", limits.vocab_size),
        _most(limits),
    )
    if len(items) * len(labels) > most:
        wrong_value(
            "items", "items", f"{len(items)} items times {len(labels)} labels are more than the {most} allowed."
        )
    joined = [_join(body, item, f"items[{index}]", limits) for index, item in enumerate(items)]
    prompts = [(await tokenise(tokenizer, one, param="items")).tokens for one in joined]
    for tokens in prompts:
        if len(tokens) + 2 > limits.context_length:  # a label, and the token that the engine draws beside it
            raise ContextLengthError(
                f"This model's maximum context length is {limits.context_length} tokens, but query and item have "
                f"{len(tokens)}, and a label needs room for two more.",
                param="items",
            )
    return prompts


def score_call(call_id: str, prompts: Sequence[list[int]], labels: Sequence[int]) -> Call:
    """The call whose choices are the pairs of items and labels, item by item."""
    pairs = [(tokens, label) for tokens in prompts for label in labels]
    return Call(
        id=call_id,
        prompts=[Prompt([*tokens, label]) for tokens, label in pairs],
        sampling=[
            SamplingParams(max_new_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(tokens))
            for tokens, _ in pairs
        ],
        text=[TextOptions()] * len(pairs),
    )


@dataclass(frozen=True)
class Scoring:
    """A checked call for scores, ready to run."""

    body: ScoreBody
    model: str
    prompts: Sequence[list[int]]
    generation: Generation

    async def whole(self) -> Json:
        """The answer; may be asked for once."""
        async with aclosing(self.generation.pieces()) as pieces:
            async for _ in pieces:
                pass
        return _score_json(self.body, self.model, self.prompts, self.generation.choices)


def _score_json(body: ScoreBody, model: str, prompts: Sequence[list[int]], choices: Sequence[Choice]) -> Json:
    """The answer: a row of probabilities an item, in the order of the labels."""
    count = len(body.label_token_ids)
    logprobs = [_last_logprob(choice) for choice in choices]
    rows = [logprobs[start : start + count] for start in range(0, len(logprobs), count)]
    num_tokens = sum(map(len, prompts))
    return {
        "object": "scoring",
        "model": model,
        "scores": [_softmax(row) if body.apply_softmax else [math.exp(value) for value in row] for row in rows],
        "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
    }


def _most(limits: Limits) -> int:
    return max(limits.max_n, limits.max_batch)


def _join(body: ScoreBody, item: object, place: str, limits: Limits) -> str | list[int]:
    query: Any = body.query
    if isinstance(query, str):
        pair = checked_text("query", "query", query), checked_text("items", place, item)
        return pair[1] + pair[0] if body.item_first else pair[0] + pair[1]
    ids = checked_ids(query, "query", "query", limits.vocab_size), checked_ids(item, "items", place, limits.vocab_size)
    return [*ids[1], *ids[0]] if body.item_first else [*ids[0], *ids[1]]


def _last_logprob(choice: Choice) -> float:
    last = choice.prompt_logprobs[-1] if choice.prompt_logprobs else None
    if last is None:
        raise EngineError("the engine gave no logprob for a label")
    return last.logprob


def _softmax(logprobs: list[float]) -> list[float]:
    """Shares of the labels alone; equal ones where none is possible at all."""
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    whole = sum(weights)
    return [weight / whole for weight in weights]
