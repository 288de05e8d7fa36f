"""The form of chat completions: OpenAI's `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgray.protocol import Usage
from sgray.serve.openai.choices import Choice, Piece, TokenEntry, finite
from sgray.serve.openai.forms import Json, usage_json
from sgray.serve.openai.reading import Reader, Reading, message
from sgray.text.token_ids import TextCodec


@dataclass(frozen=True)
class ChatForm:
    """Writes the answer of one chat call. `created` is in seconds since 1970."""

    id: str
    model: str
    created: int
    tokenizer: TextCodec
    has_logprobs: bool = False
    top_logprobs: int = 0
    has_usage: bool = False
    reading: Reading = field(default_factory=Reading)
    _readers: dict[int, Reader] = field(default_factory=dict)

    def opening(self, index: int) -> list[Json]:
        """The role, in a chunk of its own."""
        return [self._chunk([self._delta(index, {"role": "assistant", "content": ""}, [], None)])]

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """What the text holds, then the finish in a chunk of its own; logprobs go with whichever comes first."""
        reader = self._reader(choice.index)
        parts = reader.read(piece.text, is_last=piece.finish_reason is not None)
        reader.entries += piece.entries
        deltas = [self._delta(choice.index, part, reader.taken_entries(), None) for part in parts]
        if piece.finish_reason:
            reason = reader.finish_reason(piece.finish_reason)
            deltas.append(self._delta(choice.index, {}, reader.taken_entries(), reason))
        return [self._chunk([delta]) for delta in deltas]

    def _reader(self, index: int) -> Reader:
        if index not in self._readers:
            self._readers[index] = self.reading.reader()
        return self._readers[index]

    def closing(self, usage: Usage) -> list[Json]:
        """The token counts, if asked for."""
        return [self._chunk([]) | {"usage": usage_json(usage)}] if self.has_usage else []

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Json:
        """The whole answer."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(choice, pieces) for choice, pieces in choices],
            "usage": usage_json(usage),
        }

    def _choice(self, choice: Choice, pieces: list[Piece]) -> Json:
        entries = [entry for piece in pieces for entry in piece.entries]
        reader, reason = self.reading.reader(), pieces[-1].finish_reason
        assert reason is not None, "the last piece has a finish reason"
        return {
            "index": choice.index,
            "message": message(reader.read("".join(piece.text for piece in pieces), is_last=True), self.reading),
            "logprobs": self._logprobs(entries),
            "finish_reason": reader.finish_reason(reason),
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return chunk | {"usage": None} if self.has_usage else chunk

    def _delta(self, index: int, delta: Json, entries: list[TokenEntry], finish_reason: str | None) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, entries: list[TokenEntry]) -> Json | None:
        if not self.has_logprobs:
            return None
        content = [entry_json(entry, self.tokenizer, self.top_logprobs) for entry in entries]
        return {"content": content, "refusal": None}


def entry_json(entry: TokenEntry, tokenizer: TextCodec, top_logprobs: int) -> Json:
    """One token with its logprobs. An ending token is no text of the message, so it has no bytes."""
    assert entry.logprobs is not None, "a generated token has logprobs when asked for"
    best = entry.logprobs.top[:top_logprobs]
    shown = _token(entry.token, entry.logprobs.logprob, tokenizer)
    if not entry.is_text:
        shown["bytes"] = []
    return shown | {
        "top_logprobs": [_token(token, value, tokenizer) for token, value in best if value == finite(value)]
    }


def _token(token: int, logprob: float, tokenizer: TextCodec) -> Json:
    return {
        "token": tokenizer.token_text(token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }
