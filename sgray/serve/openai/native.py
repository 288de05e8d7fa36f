"""The native form, after SGLang's /generate: text so far, its token ids, and `meta_info`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sgray.protocol import Usage
from sgray.serve.openai.choices import Choice, Piece, TokenEntry, finite
from sgray.serve.openai.forms import Json
from sgray.text.token_ids import TextCodec


@dataclass
class NativeForm:
    """Writes the answer of one native call. Streamed chunks carry everything so far, as SGLang's do.

    `is_list`: the answer is a list, since the call gave a list of prompts or asked for several choices.
    """

    id: str
    tokenizer: TextCodec
    is_list: bool
    has_logprobs: bool = False
    top_logprobs: int = 0
    _pieces: dict[int, list[Piece]] = field(default_factory=dict)

    def opening(self, index: int) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The choice's answer so far."""
        pieces = self._pieces.setdefault(choice.index, [])
        pieces.append(piece)
        return [self._answer(choice, pieces) | ({"index": choice.index} if self.is_list else {})]

    def closing(self, usage: Usage) -> list[Json]:
        """Counts are in every chunk."""
        return []

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Any:
        """One answer, or a list of them in the order of prompts and choices."""
        answers = [self._answer(choice, pieces) for choice, pieces in choices]
        return answers if self.is_list else answers[0]

    def _answer(self, choice: Choice, pieces: list[Piece]) -> Json:
        meta: Json = {
            "id": f"{self.id}-{choice.index}" if self.is_list else self.id,
            "finish_reason": _finish(pieces[-1], choice.num_tokens),
            "prompt_tokens": choice.num_prompt,
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.cached_tokens,
        }
        if self.has_logprobs:
            entries = [entry for piece in pieces for entry in piece.entries]
            meta["output_token_logprobs"] = [self._own(entry) for entry in entries]
            if self.top_logprobs:
                meta["output_top_logprobs"] = [self._top(entry) for entry in entries]
        return {
            "text": "".join(piece.text for piece in pieces),
            "output_ids": [token for piece in pieces for token in piece.tokens],
            "meta_info": meta,
        }

    def _own(self, entry: TokenEntry) -> list[Any]:
        assert entry.logprobs is not None, "a generated token has logprobs when asked for"
        return [finite(entry.logprobs.logprob), entry.token, self.tokenizer.token_text(entry.token)]

    def _top(self, entry: TokenEntry) -> list[list[Any]]:
        assert entry.logprobs is not None, "a generated token has logprobs when asked for"
        best = entry.logprobs.top[: self.top_logprobs]
        return [[finite(value), token, self.tokenizer.token_text(token)] for token, value in best]


def _finish(piece: Piece, num_tokens: int) -> Json | None:
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "length":
        return {"type": "length", "length": num_tokens}
    return {"type": "stop", "matched": piece.matched}
