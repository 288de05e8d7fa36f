"""The bodies of the OpenAI routes: every field that is read, with its type, default and range.

Fields that OpenAI defines and sgray cannot honour are in `UNSUPPORTED` with the values that ask for nothing; other
names are unknown. A null field counts as left out. Fields marked "ignored" change nothing in the answer by definition.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sgray.serve.openai import request_shapes as shapes
from sgray.serve.openai.request_shapes import Like

MAX_TOP_LOGPROBS = 20
INT64 = 2**63


class Body(BaseModel):
    """Strict types, unknown names refused, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send the token counts in a last chunk without choices.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage, every chunk has the counts of the call so far (vLLM's field)."
    )
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are never padded.")


class Constrained(Body):
    """What the text must be, with SGLang's names; one of them, and none of the others that a body may have."""

    regex: str | None = Field(None, description="The whole text matches it.")
    ebnf: str | None = Field(None, description="A grammar in GBNF whose root is called root.")
    json_schema: Annotated[Any, Like(shapes.JsonSchema)] = Field(None, description="A JSON schema, also as a string.")
    structural_tag: Annotated[Any, Like(shapes.Tag)] = Field(None, description="A structural tag, also as a string.")


class Sampling(Constrained):
    """How tokens are drawn and where the text ends: the same fields in every form."""

    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1, description="0 keeps the best token alone.")
    top_k: int = Field(0, ge=-1, description="0 and -1 mean no limit, as does anything from the vocabulary size on.")
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    logit_bias: Annotated[dict[Any, Any], Like(shapes.LogitBias)] = Field(
        default_factory=dict, description="Token id to a number in [-100, 100]."
    )
    stop: Annotated[Any, Like(shapes.Stop)] = Field(None, description="A string, or an array of strings.")
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
    response_format: Annotated[Any, Like(shapes.ResponseFormat)] = Field(
        None, description='Type "text", "json_object", "json_schema" or "structural_tag".'
    )
    guided_json: Annotated[Any, Like(shapes.JsonSchema)] = Field(None, description="vLLM's name of json_schema.")
    guided_regex: str | None = Field(None, description="vLLM's name of regex.")
    guided_choice: Annotated[Any, Like(shapes.Choices)] = Field(
        None, description="An array of strings, of which the text is one."
    )
    guided_grammar: str | None = Field(None, description="vLLM's name of ebnf.")
    structured_outputs: Annotated[Any, Like(shapes.StructuredOutputs)] = Field(
        None,
        description="vLLM's newer form: json, regex, choice, grammar, json_object or structural_tag in an object.",
    )
    user: str = Field("", description="Ignored: names the end user for the provider's abuse watch.")
    include_stop_str_in_output: bool = Field(False, description="vLLM's name of no_stop_trim.")
    cache_salt: str = Field("", max_length=256, description="Callers with different salts share no cached prefix.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Larger goes first.")


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Like(shapes.Messages)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[dict[str, Any]], Like(shapes.Tools)] = Field(
        default_factory=list, description="Needs api.tool_call_parser."
    )
    tool_choice: Annotated[Any, Like(shapes.ToolChoice)] = Field(
        None, description='"auto", "none", "required", a named function, or allowed tools.'
    )
    parallel_tool_calls: bool = Field(True, description="False: one call alone. So for the only tool, if it must be.")
    separate_reasoning: bool | None = Field(None, description="False: reasoning stays in the content. See the next.")
    stream_reasoning: bool = Field(True, description="False: reasoning comes in one piece. Needs api.reasoning_parser.")
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

    prompt: Annotated[Any, Like(shapes.Prompt)]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, description="Only the value of n: all choices are returned.")


class NativeSampling(Sampling):
    """`sampling_params` of the native form, with SGLang's names."""

    max_new_tokens: int = Field(128, ge=0)
    min_new_tokens: int = Field(0, ge=0)
    sampling_seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stream_interval: int = Field(1, ge=1, description="Tokens between two chunks; the first and the last come anyway.")


class NativeBody(Body):
    """POST /generate: exactly one of `text` and `input_ids`, each one prompt or an array of them."""

    text: Annotated[Any, Like(shapes.Texts)] = None
    input_ids: Annotated[Any, Like(shapes.Ids)] = None
    sampling_params: Annotated[Any, Like(NativeSampling | list[NativeSampling])] = Field(
        None, description="An object, or an array of them, one a prompt."
    )
    rid: Annotated[Any, Like(str | list[str])] = Field(
        None, description="The call's name for /abort_request, or an array of them, one a prompt."
    )
    stream: bool = False
    return_logprob: Annotated[Any, Like(bool | list[bool])] = Field(
        False, description="Also an array, one a prompt; so the next two."
    )
    top_logprobs_num: Annotated[Any, Like(shapes.Counts)] = Field(0, description="Best alternatives beside each token.")
    logprob_start_len: Annotated[Any, Like(shapes.Starts)] = Field(
        None,
        description="First prompt token whose logprob is wanted; -1: those of the answer alone. Unset: -1, but 0 where "
        "max_new_tokens is 0, since there is nothing else to ask for.",
    )
    token_ids_logprob: Annotated[Any, Like(shapes.Ids)] = Field(
        None, description="Token ids whose logprobs come with each token's, or an array of such arrays, one a prompt."
    )
    return_text_in_logprobs: bool = Field(False, description="The text of each token beside its id, else null.")
    program_id: Annotated[Any, Like(str | list[str])] = Field(
        "",
        description="What the call is a part of, of at most 256 characters, or an array, one a prompt: its prefix "
        "stays in the cache until /end_programs, and its calls meet on one replica.",
    )
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages with what a chat call would send beside them."""

    model: str | None = None
    prompt: Annotated[Any, Like(shapes.Texts)] = Field(None, description="A string, or an array of strings.")
    messages: Annotated[Any, Like(shapes.Messages)] = None
    add_special_tokens: bool | None = Field(None, description="What the tokenizer adds to a prompt; true if unset.")
    add_generation_prompt: Annotated[Any, Like(bool)] = None
    continue_final_message: Annotated[Any, Like(bool)] = None
    chat_template_kwargs: Annotated[Any, Like(shapes.TemplateVariables)] = None
    tools: Annotated[Any, Like(shapes.Tools)] = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Any, Like(list[shapes.TokenId] | list[list[shapes.TokenId]])]
    skip_special_tokens: bool = True


class ScoreBody(Body):
    """POST /v1/score: texts, or token ids, for query and items alike."""

    model: str | None = None
    query: Annotated[Any, Like(str | shapes.TokenIds)]
    items: Annotated[Any, Like(shapes.Prompt)]
    label_token_ids: Annotated[Any, Like(shapes.TokenIds)]
    apply_softmax: bool = Field(False, description="Shares of the labels alone instead of probabilities.")
    item_first: bool = False
    user: str = Field("", description="Ignored, as in calls.")


class AbortBody(Body):
    """POST /abort_request."""

    rid: str = Field("", max_length=512)
    abort_all: bool = False


class EndProgramsBody(Body):
    """POST /end_programs."""

    program_ids: list[str] = Field(max_length=4096)


TEXT_ONLY = "the models served here read text alone"
TRANSFER = "prompts are not computed on other replicas than answers"

UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "this server makes no audio"),
    "functions": (([],), "it is the old form of tools, which are read here"),
    "function_call": (("none",), "it is the old form of tool_choice, which is read here"),
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
}
"""Known fields that cannot be honoured: the values that ask for nothing, and the reason for refusing the others."""

NATIVE_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "input_embeds": ((), "prompts are text or token ids"),
    "image_data": (([],), TEXT_ONLY),
    "video_data": (([],), TEXT_ONLY),
    "audio_data": (([],), TEXT_ONLY),
    "mm_hashes": (([],), TEXT_ONLY),
    "modalities": (([], ["text"]), TEXT_ONLY),
    "return_hidden_states": ((False,), "hidden states are not given out"),
    "return_routed_experts": ((False,), "the experts that tokens went through are not given out"),
    "return_sampling_mask": ((False,), "the mask of sampling is not given out"),
    "lora_path": (("",), "there are no adapters"),
    "session_params": (({},), "there are no sessions; a common prefix is found by its content"),
    "session_id": (("",), "there are no sessions; a common prefix is found by its content"),
    "conversation_id": (("",), "there are no sessions; a common prefix is found by its content"),
    "custom_logit_processor": (("",), "code from clients is never run"),
    "bootstrap_host": ((), TRANSFER),
    "bootstrap_port": ((), TRANSFER),
    "bootstrap_room": ((), TRANSFER),
    "data_parallel_rank": ((), "the replica is chosen by load and cached prefix"),
    "routed_dp_rank": ((), "the replica is chosen by load and cached prefix"),
    "routing_key": (("",), "the replica is chosen by load and cached prefix"),
    "extra_key": (("",), "use cache_salt to keep callers apart"),
    "kv_hints": (({},), "the prefix cache is automatic"),
    "require_reasoning": ((False,), "reasoning is not read here"),
    "max_thinking_tokens": ((), "reasoning is not read here"),
    "background": ((False,), "an answer is given to whoever waits for it"),
    "no_logs": ((False, True), "prompts and answers are never logged"),
    "log_metrics": ((True,), "every call is counted"),
    "custom_labels": (({},), "metrics have fixed labels"),
}
"""The same for the native form, whose fields are SGLang's."""

NATIVE_SAMPLING_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "stop_regex": (([],), "patterns that end an answer are not supported; use stop"),
    "beam_width": ((1,), "there is no beam search; use n"),
    "spaces_between_special_tokens": ((True,), "text is exactly what the tokens say"),
    "custom_params": (({},), "there is no custom code that would read them"),
}
"""The same for its `sampling_params`."""
