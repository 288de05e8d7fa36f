"""The answers of the routes as types: what the schema of the API says of them.

The forms write answers as plain dictionaries, since that is done for every token; tests hold the two together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sgray.serve.openai.request_shapes import FunctionCall

FinishReason = Literal["stop", "length", "tool_calls"]
Row = tuple[float | None, int, str | None]


class AnswerBody(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(AnswerBody):
    """What was wrong, what was expected and what to do."""

    message: str
    type: str
    param: str | None = Field(description="The field that is to blame, where one is.")
    code: str | None


class ErrorAnswer(AnswerBody):
    """Every answer that is no success."""

    error: ErrorDetail


class CachedTokens(AnswerBody):
    """A part of the prompt's tokens."""

    cached_tokens: int = Field(description="Those found in the prefix cache.")


class Usage(AnswerBody):
    """Token counts. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprob(AnswerBody):
    """A token, its logprob (-9999 for none) and its bytes, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A token of the answer with the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerBody):
    """One entry a token."""

    content: list[ChatTokenLogprob]
    refusal: None


class ToolCall(AnswerBody):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(AnswerBody):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(None, description="Where the server tells reasoning apart.")
    tool_calls: list[ToolCall] = Field(default_factory=list, description="Left out where there are none.")


class ChatChoice(AnswerBody):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(AnswerBody):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(AnswerBody):
    """More of a call: its name once, its arguments in pieces."""

    name: str = Field("", description="In the first piece alone.")
    arguments: str


class ToolCallDelta(AnswerBody):
    """More of one tool call; `id` and `type` come once."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(AnswerBody):
    """What is new of a message; fields without news are left out."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatChunkChoice(AnswerBody):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(AnswerBody):
    """A piece of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(None, description="With stream_options alone.")


class CompletionLogprobs(AnswerBody):
    """Parallel lists, one item a token; the first token of a prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(AnswerBody):
    """One answer to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="Null before the last chunk of a stream.")
    token_ids: list[int] = Field(default_factory=list, description="Of servers without a tokenizer.")


class CompletionAnswer(AnswerBody):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(AnswerBody):
    """A piece of a streamed text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = Field(None, description="With stream_options alone.")


class NativeMeta(AnswerBody):
    """What is known of one answer beside its text. A row is [logprob, token id, text or null]."""

    id: str
    finish_reason: dict[str, Any] | None = Field(description="`type` is stop, length or abort.")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float = Field(0.0, description="Seconds; with the finish reason alone.")
    input_token_logprobs: list[Row] = Field(default_factory=list, description="With return_logprob; so the next three.")
    output_token_logprobs: list[Row] = Field(default_factory=list)
    input_top_logprobs: list[list[Row] | None] = Field(default_factory=list)
    output_top_logprobs: list[list[Row] | None] = Field(default_factory=list)


class NativeAnswer(AnswerBody):
    """The text of one answer, its token ids, and what is known of it. Chunks hold everything so far."""

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int = Field(0, description="In the chunks of calls with several answers.")


class TokenizeAnswer(AnswerBody):
    """The ids of a text, or of each of several."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] = Field(default_factory=list, description="With return_token_strs alone.")


class DetokenizeAnswer(AnswerBody):
    """The text of ids, or of each of several lists, under two names."""

    text: str | list[str]
    prompt: str | list[str]


class ScoreUsage(AnswerBody):
    """Token counts of queries and items."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ScoreAnswer(AnswerBody):
    """A row of probabilities an item, in the order of the labels."""

    object: Literal["scoring"]
    model: str
    scores: list[list[Annotated[float, Field(ge=0, le=1)]]]
    usage: ScoreUsage


class ModelCard(AnswerBody):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(AnswerBody):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(AnswerBody):
    """Which model is served."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    architectures: list[str]


class ServerInfo(AnswerBody):
    """The version, the model, the configuration and the load of each replica."""

    model_path: str
    tokenizer_path: str
    version: str
    served_model_name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    page_size: int
    max_total_num_tokens: int
    max_running_requests: int
    config: dict[str, Any] = Field(description="Without the places of keys.")
    internal_states: list[dict[str, Any]]


class ReplicaView(AnswerBody):
    """One replica now; `generation_tokens` is a total since its start."""

    name: str
    running: int
    waiting: int
    waiting_tokens: int = Field(description="Prompt tokens to compute.")
    kv_total_tokens: int = Field(description="Size of the key-value memory.")
    kv_used_tokens: int
    kv_cached_tokens: int = Field(description="Cached and not in use.")
    hit_rate: float = Field(description="Cached share of prompts.")
    generation_tokens: int
    prefill_tokens_per_s: float = Field(description="0 until known.")
    decode_step_s: float = Field(description="0 until known.")


class PrefixView(AnswerBody):
    """The beginning that some prompts have in common."""

    hash: str
    tokens: int
    requests: int = Field(description="Old ones fade.")
    parent: str | None = Field(description="The longest of the told prefixes that this one begins with.")


class DecisionView(AnswerBody):
    """Where a request went, and what of its prompt was thought to be cached there."""

    time: float = Field(description="Seconds since 1970.")
    replica: str
    prompt_tokens: int
    predicted_cached_tokens: int
    cached_tokens: int | None = Field(description="What was found; null before the first token.")


class Overview(AnswerBody):
    """What the live page shows, as one ingress knows it."""

    model: str
    version: str
    policy: str = Field(description="How a replica is chosen.")
    hit_rate: float
    replicas: list[ReplicaView]
    prefixes: list[PrefixView]
    decisions: list[DecisionView] = Field(description="The newest first.")


class Status(AnswerBody):
    """It is well."""

    status: Literal["ok"]
