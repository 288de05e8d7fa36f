"""The form of Anthropic's messages: the `message` object, and the events that build it up, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sgray.protocol import Usage
from sgray.serve.openai.blocks import Block, BlockEvent, BlockReader, Closed, Grown, Opened
from sgray.serve.openai.choices import Choice, Piece
from sgray.serve.openai.forms import Json

SIGNATURE = "unsigned"
"""What stands where Anthropic signs thoughts: clients send it back, and nobody checks it."""

_OBJECT = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class MessageForm:
    """Writes the answer of one call.

    `usage` tells the counts so far. `is_capped`: the context leaves fewer tokens than the call allows. With
    `hides_thoughts` thinking blocks are empty.
    """

    id: str
    model: str
    reader: BlockReader
    usage: Callable[[], Usage]
    is_capped: bool = False
    hides_thoughts: bool = False

    def opening(self, index: int) -> list[Json]:
        """The message without any content, then a ping, which clients skip."""
        usage = self._usage(self.usage()) | {"output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, None, usage)}, {"type": "ping"}]

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The events of one piece."""
        return [chunk for event in self.reader.read(piece) for chunk in self._chunks(event)]

    def closing(self, usage: Usage) -> list[Json]:
        """Why the message ended, and all counts."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._counts(usage)},
            {"type": "message_stop"},
        ]

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Json:
        """The whole message from all pieces of its one choice."""
        ((_, pieces),) = choices
        for piece in pieces:
            self.reader.read(piece)
        content = [self._content(block) for block in self.reader.blocks]
        return self._message(content, *self._stop(), self._usage(usage))

    def _chunks(self, event: BlockEvent) -> list[Json]:
        block = event.block
        match event:
            case Opened():
                return [{"type": "content_block_start", "index": block.index, "content_block": _begun(block)}]
            case Grown(text=text):
                return self._delta(block, text)
            case Closed():
                signed = [_delta(block, "signature_delta", "signature", SIGNATURE)] if block.kind == "thinking" else []
                return [*signed, {"type": "content_block_stop", "index": block.index}]

    def _delta(self, block: Block, text: str) -> list[Json]:
        match block.kind:
            case "text":
                return [_delta(block, "text_delta", "text", text)]
            case "call":
                return [_delta(block, "input_json_delta", "partial_json", text)]
            case "thinking":
                return [] if self.hides_thoughts else [_delta(block, "thinking_delta", "thinking", text)]

    def _content(self, block: Block) -> Json:
        """A block as it stands in the message."""
        match block.kind:
            case "text":
                return _begun(block) | {"text": block.text}
            case "thinking":
                return _begun(block) | {"thinking": "" if self.hides_thoughts else block.text, "signature": SIGNATURE}
            case "call":
                return _begun(block) | {"input": _input(block.text)}

    def _stop(self) -> tuple[str, str | None]:
        """Why the message ended, and the stop sequence that ended it."""
        match self.reader.finish_reason:
            case "tool_calls":
                return "tool_use", None
            case "length":
                return "model_context_window_exceeded" if self.is_capped else "max_tokens", None
            case _:
                matched = self.reader.matched
                return ("stop_sequence", matched) if isinstance(matched, str) else ("end_turn", None)

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> Json:
        return self._counts(usage) | {"service_tier": "standard"}

    def _counts(self, usage: Usage) -> Json:
        """Anthropic counts cached tokens apart: the prompt has the sum."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.reader.thinking_tokens},
        }


def _begun(block: Block) -> Json:
    """A block as it begins."""
    match block.kind:
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: Block, kind: str, name: str, text: str) -> Json:
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object: of those that broke off what is whole, of those that are no JSON nothing."""
    try:
        return _OBJECT.validate_json(arguments, experimental_allow_partial=True)
    except ValidationError:
        return {}
