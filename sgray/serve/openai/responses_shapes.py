"""The answers of POST /v1/responses as types, for the schema of the API. The form writes plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from sgray.serve.openai.answer_shapes import AnswerBody, ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerBody):
    """A text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[None] = Field(description="Always empty.")
    logprobs: list[ChatTokenLogprob]


class ReasoningText(AnswerBody):
    """A thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerBody):
    """What the model says."""

    id: str
    status: ItemStatus
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(AnswerBody):
    """What the model thinks."""

    id: str
    status: ItemStatus
    type: Literal["reasoning"]
    summary: list[None] = Field(description="Always empty: thoughts are given in full.")
    content: list[ReasoningText]
    encrypted_content: None


class OutputCall(AnswerBody):
    """A function that the model wants called."""

    id: str
    status: ItemStatus
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseError(AnswerBody):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(AnswerBody):
    """Why a response is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseInputDetails(AnswerBody):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(AnswerBody):
    """Parts of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(AnswerBody):
    """Token counts."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseAnswer(AnswerBody):
    """A response. It also has the fields of the call, with what holds where they were left out."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None


class ResponseEvent(AnswerBody):
    """One event of a streamed response: OpenAI's, by its type, which is also the event's name."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    response: ResponseAnswer | None = Field(None, description="Of response.created, .in_progress and those at the end.")
    item: Any = Field(None, description="Of response.output_item.added and .done.")
    delta: str | None = Field(None, description="Of the types that end in .delta.")
