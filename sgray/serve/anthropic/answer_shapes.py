"""The answers of Anthropic's routes as types, for the schema of the API. The form writes plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from sgray.serve.openai.answer_shapes import AnswerBody


class TextBlock(AnswerBody):
    """A text of the answer."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(AnswerBody):
    """A thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(AnswerBody):
    """A tool that the model wants used."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(AnswerBody):
    """A part of the answer's tokens."""

    thinking_tokens: int


class MessageUsage(AnswerBody):
    """Token counts; those found in the prefix cache are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: Literal["standard"]


class AnthropicMessage(AnswerBody):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class AnthropicEvent(AnswerBody):
    """One event of a streamed message: Anthropic's, by its type, which is also the event's name."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    index: int | None = Field(None, description="Of a block, as it stands in the message.")


class TokenCount(AnswerBody):
    """How long a prompt is."""

    input_tokens: int


class AnthropicErrorDetail(AnswerBody):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(AnswerBody):
    """Every answer of Anthropic's routes that is no success."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
