"""The form of text completions: OpenAI's `text_completion`, whole and in chunks.

Where there is no tokenizer the text is empty and each choice has `token_ids`, vLLM's field.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgray.protocol import Usage
from sgray.serve.openai.choices import Choice, Piece, TokenEntry, finite
from sgray.serve.openai.forms import Json, usage_json
from sgray.text.token_ids import TextCodec


@dataclass(frozen=True)
class CompletionForm:
    """Writes the answer of one completions call. `top_logprobs` None means that no logprobs were asked for."""

    id: str
    model: str
    created: int
    tokenizer: TextCodec
    top_logprobs: int | None = None
    has_usage: bool = False

    def opening(self, index: int) -> list[Json]:
        """Text completions begin with their text."""
        return []

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """Text, logprobs and finish in one chunk."""
        return [self._chunk([self._choice(choice.index, [piece])])]

    def closing(self, usage: Usage) -> list[Json]:
        """The token counts, if asked for."""
        return [self._chunk([]) | {"usage": usage_json(usage)}] if self.has_usage else []

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Json:
        """The whole answer."""
        answers = [self._choice(choice.index, pieces) for choice, pieces in choices]
        return self._answer(answers) | {"usage": usage_json(usage)}

    def _answer(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return self._answer(choices) | ({"usage": None} if self.has_usage else {})

    def _choice(self, index: int, pieces: list[Piece]) -> Json:
        entries = [entry for piece in pieces for entry in piece.entries]
        choice = {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(entries, self.top_logprobs) if self.top_logprobs is not None else None,
            "finish_reason": pieces[-1].finish_reason,
        }
        if not self.tokenizer.has_text:
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
        return choice

    def _logprobs(self, entries: list[TokenEntry], num_top: int) -> Json:
        """Parallel lists, one item a token; the first token of a prompt has no logprob."""
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprobs.logprob) if entry.logprobs else None for entry in entries],
            "top_logprobs": [self._top(entry, num_top) for entry in entries] if num_top else None,
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenEntry, num_top: int) -> dict[str, float] | None:
        """The best alternatives, and the token itself where it is not one of them."""
        if entry.logprobs is None:
            return None
        best = {self._text(token): value for token, value in entry.logprobs.top[:num_top] if value == finite(value)}
        best.setdefault(self._text(entry.token), finite(entry.logprobs.logprob))
        return best

    def _text(self, token: int) -> str:
        """The token's text; for one that is no whole characters, its bytes, so that no two tokens look alike."""
        raw = self.tokenizer.token_bytes(token)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self.tokenizer.token_text(token)
