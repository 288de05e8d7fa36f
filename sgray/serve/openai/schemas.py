"""The bodies of the OpenAI routes: every field that is read, with its type, default and range.

Fields that OpenAI defines and sgray cannot honour are in `UNSUPPORTED` with the values that ask for nothing; other
names are unknown. A null field counts as left out. Fields marked "ignored" change nothing in the answer by definition.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOP_LOGPROBS = 20
INT64 = 2**63


class Body(BaseModel):
    """Strict types, unknown names refused, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send the token counts in a last chunk without choices.")
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are never padded.")


class Sampling(Body):
    """How tokens are drawn and where the text ends: the same fields in every form."""

    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1, description="0 keeps the best token alone.")
    top_k: int = Field(0, ge=-1, description="0 and -1 mean no limit, as does anything from the vocabulary size on.")
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    logit_bias: dict[Any, Any] = Field(default_factory=dict, description="Token id to a number in [-100, 100].")
    stop: Any = Field(None, description="A string, or an array of strings.")
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = Field(False, description="Keep the stop text or stop token in the answer.")


class OpenAIBody(Sampling):
    """The fields that chat and text completions share."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="Choice i of a prompt uses seed + i.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Any = Field(None, description='Only {"type": "text"} so far.')
    user: str = Field("", description="Ignored: names the end user for the provider's abuse watch.")
    include_stop_str_in_output: bool = Field(False, description="vLLM's name of no_stop_trim.")
    cache_salt: str = Field("", max_length=256, description="Callers with different salts share no cached prefix.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Larger goes first.")


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] = Field(default_factory=list, description="Only empty so far.")
    tool_choice: Any = Field(None, description='"none" or "auto" so far.')
    parallel_tool_calls: bool = Field(True, description="Ignored: without tools there is nothing to call.")
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Go on with the assistant's last message.")
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Further variables for the chat template."
    )
    metadata: dict[str, str] = Field(default_factory=dict, description="Ignored: labels of stored answers.")
    safety_identifier: str = Field("", description="Ignored, as user.")
    prompt_cache_key: str = Field("", description="Ignored: a hint for placement; prefixes are found by content here.")


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, description="Only the value of n: all choices are returned.")


class NativeSampling(Sampling):
    """`sampling_params` of the native form, with SGLang's names."""

    max_new_tokens: int = Field(128, ge=0)
    min_new_tokens: int = Field(0, ge=0)
    sampling_seed: int | None = Field(None, ge=-INT64, lt=INT64)


class NativeBody(Body):
    """POST /generate: exactly one of `text` and `input_ids`, each one prompt or an array of them."""

    text: Any = None
    input_ids: Any = None
    sampling_params: NativeSampling = Field(default_factory=NativeSampling)
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    logprob_start_len: Literal[-1] = Field(-1, description="Only -1: logprobs of the answer alone.")
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)


STRUCTURED = "structured output is not supported yet"

UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "this server makes no audio"),
    "functions": (([],), "tool calls are not supported yet"),
    "function_call": (("none",), "tool calls are not supported yet"),
    "modalities": ((["text"],), "only ['text'] is made here"),
    "moderation": ((), "there is no moderation here"),
    "prediction": ((), "predicted outputs are not supported"),
    "prompt_cache_options": ((), "the prefix cache is automatic; use cache_salt to keep callers apart"),
    "prompt_cache_retention": (("in_memory",), "the prefix cache lives in memory alone"),
    "reasoning_effort": (("none",), "the effort of reasoning cannot be set"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "answers are not stored"),
    "verbosity": (("medium",), "verbosity cannot be set"),
    "web_search_options": ((), "there is no web search"),
    "suffix": (("",), "text cannot be inserted before a suffix"),
    "regex": ((), STRUCTURED),
    "ebnf": ((), STRUCTURED),
    "json_schema": ((), STRUCTURED),
    "structural_tag": ((), STRUCTURED),
    "guided_json": ((), STRUCTURED),
    "guided_regex": ((), STRUCTURED),
    "guided_choice": ((), STRUCTURED),
    "guided_grammar": ((), STRUCTURED),
}
"""Known fields that cannot be honoured: the values that ask for nothing, and the reason for refusing the others."""
