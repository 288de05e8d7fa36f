"""The native form, after SGLang's /generate: text so far, its token ids, and `meta_info`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgray.errors import EngineError
from sgray.protocol import TokenLogprobs, Usage
from sgray.serve.openai.choices import Choice, Piece, finite
from sgray.serve.openai.forms import Json
from sgray.serve.openai.native_fields import LogprobAsk
from sgray.text.token_ids import TextCodec

Entry = list[Any]  # [logprob, token id, text or None]


@dataclass(slots=True)
class _Written:
    """What has come of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    own: list[Entry] = field(default_factory=list)
    top: list[list[Entry] | None] = field(default_factory=list)
    of_ids: list[list[Entry] | None] = field(default_factory=list)
    sent: int = 0  # tokens in the last chunk


@dataclass
class NativeForm:
    """Writes the answer of one native call. Streamed chunks carry everything so far, as SGLang's do.

    `asks` and `intervals` (tokens between two chunks of an answer) have one item a prompt, `names` one an answer.
    `is_list`: the answer is a list, since the call gave a list of prompts or asked for several choices. `started` is in
    the seconds of `time.monotonic`.
    """

    names: list[str]
    asks: list[LogprobAsk]
    tokenizer: TextCodec
    is_list: bool
    has_text_in_logprobs: bool = False
    intervals: Sequence[int] = (1,)
    started: float = field(default_factory=time.monotonic)
    _written: dict[int, _Written] = field(default_factory=dict)

    def opening(self, index: int) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The choice's answer so far, where it is time for one."""
        self._add(choice, piece)
        written = self._written[choice.index]
        interval = self.intervals[choice.index * len(self.intervals) // len(self.names)]
        if piece.finish_reason is None and written.sent and choice.num_tokens - written.sent < interval:
            return []
        written.sent = choice.num_tokens
        return [self._answer(choice, piece) | ({"index": choice.index} if self.is_list else {})]

    def closing(self, usage: Usage) -> list[Json]:
        """Counts are in every chunk."""
        return []

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Any:
        """One answer, or a list of them in the order of prompts and choices."""
        for choice, pieces in choices:
            for piece in pieces:
                self._add(choice, piece)
        answers = [self._answer(choice, pieces[-1]) for choice, pieces in choices]
        return answers if self.is_list else answers[0]

    def _ask(self, choice: Choice) -> LogprobAsk:
        return self.asks[choice.index * len(self.asks) // len(self.names)]

    def _add(self, choice: Choice, piece: Piece) -> None:
        written = self._written.setdefault(choice.index, _Written())
        written.text += piece.text
        written.tokens += piece.tokens
        ask = self._ask(choice)
        for entry in piece.entries:
            assert entry.logprobs is not None, "a generated token has logprobs when asked for"
            written.own.append(self._entry(entry.token, entry.logprobs))
            if ask.num_top:
                written.top.append(self._top(entry.logprobs, ask.num_top))
            if ask.ids:
                written.of_ids.append(self._of_ids(entry.logprobs, ask))

    def _answer(self, choice: Choice, last: Piece) -> Json:
        """Lists are copied: who keeps a chunk does not see it grow."""
        written, ask = self._written[choice.index], self._ask(choice)
        meta: Json = {
            "id": self.names[choice.index],
            "finish_reason": _finish(last, choice.num_tokens),
            "prompt_tokens": choice.num_prompt,
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.cached_tokens,
        }
        if last.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self.started
        if ask.is_asked:
            tokens, found = self._of_prompt(choice, last, ask)
            own = [self._entry(token, values) for token, values in zip(tokens, found, strict=True)]
            meta |= {"input_token_logprobs": own, "output_token_logprobs": list(written.own)}
            if ask.num_top:
                top = [self._top(values, ask.num_top) if values else None for values in found]
                meta |= {"input_top_logprobs": top, "output_top_logprobs": list(written.top)}
            if ask.ids:
                of_ids = [self._of_ids(values, ask) if values else None for values in found]
                meta |= {"input_token_ids_logprobs": of_ids, "output_token_ids_logprobs": list(written.of_ids)}
        return {"text": written.text, "output_ids": list(written.tokens), "meta_info": meta}

    def _of_prompt(self, choice: Choice, last: Piece, ask: LogprobAsk) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The prompt's tokens from the start asked for, and their logprobs; the first of a prompt has none."""
        tokens, found = choice.prompt_tokens, choice.prompt_logprobs
        if ask.start is None or ask.start == len(tokens) or (found is None and last.finish_reason == "abort"):
            return [], []
        if found is None or len(found) != len(tokens):
            raise EngineError(f"the engine gave logprobs for {len(found or [])} of {len(tokens)} prompt tokens")
        return tokens[ask.start :], found[ask.start :]

    def _entry(self, token: int, values: TokenLogprobs | None) -> Entry:
        return [finite(values.logprob) if values else None, token, self._text(token)]

    def _top(self, values: TokenLogprobs, num_top: int) -> list[Entry]:
        return [[finite(value), token, self._text(token)] for token, value in values.top[:num_top]]

    def _of_ids(self, values: TokenLogprobs, ask: LogprobAsk) -> list[Entry]:
        return [[finite(value), token, self._text(token)] for token, value in zip(ask.ids, values.of_ids, strict=True)]

    def _text(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self.has_text_in_logprobs else None


def _finish(piece: Piece, num_tokens: int) -> Json | None:
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "length":
        return {"type": "length", "length": num_tokens}
    if piece.finish_reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    return {"type": "stop", "matched": piece.matched}
