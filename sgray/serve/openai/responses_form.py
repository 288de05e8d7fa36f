"""The form of responses: OpenAI's `response` object, and the events that build it up.

Each block of the answer is an item of the output: thoughts a `reasoning`, texts a `message` with one part, calls a
`function_call`. An item is the same in its events and in the answer, its ids included.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from itertools import count

from sgray.errors import SgrayError
from sgray.protocol import Usage
from sgray.serve.openai.blocks import Block, BlockEvent, BlockReader, Closed, Grown, Opened
from sgray.serve.openai.chat import entry_json
from sgray.serve.openai.choices import Choice, Piece, TokenEntry
from sgray.serve.openai.forms import Json
from sgray.serve.openai.reading import Reading
from sgray.serve.openai.responses_fields import ResponsesBody
from sgray.text.token_ids import TextCodec

_PREFIX = {"thinking": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True)
class ResponsesForm:
    """Writes the answer of one call. `created` is in seconds since 1970."""

    id: str
    model: str
    created: int
    given: ResponsesBody
    tokenizer: TextCodec
    reader: BlockReader
    _numbers: count[int] = field(default_factory=count)
    _item_ids: dict[int, str] = field(default_factory=dict)

    def opening(self, index: int) -> list[Json]:
        """The response without any output."""
        return [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The events of one piece."""
        return [chunk for event in self.reader.read(piece) for chunk in self._chunks(event)]

    def closing(self, usage: Usage) -> list[Json]:
        """The whole response."""
        response = self._finished(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Json:
        """The whole response from all pieces of its one choice."""
        ((_, pieces),) = choices
        for piece in pieces:
            self.reader.read(piece)
        return self._finished(usage)

    def failed(self, error: SgrayError, request_id: str) -> list[Json]:
        """What ends a stream that failed: the error, and the response as far as it came."""
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        response = self._response() | {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": self._output("incomplete"),
        }
        return [self._event("error", **told), self._event("response.failed", response=response)]

    def _event(self, name: str, /, **fields: object) -> Json:
        return {"type": name, "sequence_number": next(self._numbers), **fields}

    def _chunks(self, event: BlockEvent) -> list[Json]:
        block = event.block
        place: Json = {"output_index": block.index}
        match event:
            case Opened():
                item = self._item(block, "in_progress")
                added = self._event("response.output_item.added", **place, item=item)
                return [added, *self._part_event("added", block)]
            case Grown(text=text, entries=entries):
                return [self._grown(block, text, entries)]
            case Closed(is_last=is_last):
                item = self._item(block, self._item_status(block, is_last=is_last))
                return [*self._ended(block), self._event("response.output_item.done", **place, item=item)]

    def _grown(self, block: Block, text: str, entries: list[TokenEntry]) -> Json:
        place = self._place(block)
        match block.kind:
            case "call":
                return self._event("response.function_call_arguments.delta", **place, delta=text)
            case "thinking":
                return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
            case "text":
                told = {"delta": text, "logprobs": self._logprobs(entries)}
                return self._event("response.output_text.delta", **place, content_index=0, **told)

    def _ended(self, block: Block) -> list[Json]:
        """What says that the text of a block is whole."""
        place = self._place(block)
        if block.kind == "call":
            told = {"name": block.name, "arguments": block.text}
            return [self._event("response.function_call_arguments.done", **place, **told)]
        place["content_index"] = 0
        if block.kind == "thinking":
            done = self._event("response.reasoning_text.done", **place, text=block.text)
        else:
            logprobs = self._logprobs(block.entries)
            done = self._event("response.output_text.done", **place, text=block.text, logprobs=logprobs)
        return [done, *self._part_event("done", block)]

    def _part_event(self, name: str, block: Block) -> list[Json]:
        if block.kind == "call":
            return []
        place = self._place(block) | {"content_index": 0}
        return [self._event(f"response.content_part.{name}", **place, part=self._part(block))]

    def _place(self, block: Block) -> Json:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _item_id(self, block: Block) -> str:
        if block.index not in self._item_ids:
            self._item_ids[block.index] = f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}"
        return self._item_ids[block.index]

    def _item(self, block: Block, status: str) -> Json:
        """A block as an item; one that has just begun has no part yet."""
        item: Json = {"id": self._item_id(block), "status": status}
        parts = [] if status == "in_progress" else [self._part(block)]
        match block.kind:
            case "call":
                call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call", **call}
            case "thinking":
                return item | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
            case "text":
                return item | {"type": "message", "role": "assistant", "content": parts}

    def _part(self, block: Block) -> Json:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs(block.entries)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, entries: list[TokenEntry]) -> list[Json]:
        top = self.given.top_logprobs or 0
        return [entry_json(entry, self.tokenizer, top) for entry in entries]

    def _item_status(self, block: Block, *, is_last: bool) -> str:
        """Arguments that are no JSON object are no call to be made."""
        is_cut = is_last and self.reader.finish_reason == "length"
        return "incomplete" if is_cut or (block.kind == "call" and not block.is_object) else "completed"

    def _output(self, last_status: str) -> list[Json]:
        """All items, the last with a status of its own where the answer broke off."""
        last = len(self.reader.blocks) - 1
        return [
            self._item(block, last_status or self._item_status(block, is_last=True))
            if block.index == last
            else self._item(block, self._item_status(block, is_last=False))
            for block in self.reader.blocks
        ]

    def _finished(self, usage: Usage) -> Json:
        is_cut = self.reader.finish_reason == "length"
        return self._response() | {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(""),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reader.thinking_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _response(self) -> Json:
        """The response as it begins: what was asked for, and nothing of the answer."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
            **_asked(self.given),
        }


def response_form(
    body: ResponsesBody, call_id: str, model: str, tokenizer: TextCodec, reading: Reading
) -> ResponsesForm:
    """The form of a checked call that starts now."""
    return ResponsesForm(call_id, model, int(time.time()), body, tokenizer, BlockReader(reading))


def _asked(given: ResponsesBody) -> Json:
    """The fields of a call that come back in its response, with what holds where they were left out."""
    reasoning = given.reasoning
    effort, summary = (None, None) if reasoning is None else (reasoning.effort, reasoning.summary)
    text = given.text
    return {
        "background": False,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "max_tool_calls": given.max_tool_calls,
        "metadata": given.metadata,
        "parallel_tool_calls": given.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": given.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": given.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": given.temperature,
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": given.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": False} | tool for tool in given.tools],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": given.top_p,
        "truncation": "disabled",
        "user": given.user,
    }
