"""The calls of the API as Python functions: bodies in, answers out. HTTP routes and Serve handles both call these."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from sgray.config import Config
from sgray.errors import InvalidRequestError, ModelNotFoundError
from sgray.protocol import NO_LOGPROBS, SamplingParams
from sgray.serve.openai.answers import Answer
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.chat import ChatForm
from sgray.serve.openai.completions import CompletionForm
from sgray.serve.openai.forms import Form, Json
from sgray.serve.openai.generation import Call, Generation
from sgray.serve.openai.messages import num_chars, template_messages
from sgray.serve.openai.metrics import ApiMetrics
from sgray.serve.openai.native import NativeForm
from sgray.serve.openai.prompts import THREAD_CHARS, Prompt, answer_tokens, parse_prompts, tokenise
from sgray.serve.openai.sampling import (
    Limits,
    TextOptions,
    check_response_format,
    checked_n,
    sampling_params,
    stop_strings,
)
from sgray.serve.openai.schemas import UNSUPPORTED, ChatBody, CompletionBody, NativeBody, NativeSampling, OpenAIBody
from sgray.serve.openai.validate import checked_text, parse_body, shown, wrong_value
from sgray.text.token_ids import REFUSAL, TextCodec

_DEFAULT_COMPLETION_TOKENS = 16  # the reference's default for text completions; chat has none


class OpenAIService:
    """Checks calls and runs them on a backend.

    The `open_*` functions check a body and raise a SgrayError that says what is wrong with it; nothing is submitted
    before the answer is read. `chat`, `completions` and `generate` are the same in one step.
    """

    def __init__(self, config: Config, tokenizer: TextCodec, backend: Backend) -> None:
        self.model_name = config.model_name
        self.backend = backend
        self.metrics = ApiMetrics(config.model_name, backend)
        self._api = config.api
        self._tokenizer = tokenizer
        self._created = int(time.time())

    async def chat(self, body: Mapping[str, Any]) -> Json | AsyncIterator[Json]:
        """A chat completion: the answer, or its chunks where the body says `stream`."""
        return await _run(await self.open_chat(body))

    async def completions(self, body: Mapping[str, Any]) -> Json | AsyncIterator[Json]:
        """A text completion: the answer, or its chunks where the body says `stream`."""
        return await _run(await self.open_completions(body))

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The native form: an answer, a list of them for lists of prompts, or chunks where the body says `stream`."""
        return await _run(await self.open_native(body))

    def models(self) -> Json:
        """The list of served models."""
        return {"object": "list", "data": [self.model(self.model_name)]}

    def model(self, name: str) -> Json:
        """One served model; raises ModelNotFoundError."""
        self._check_model(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "sgray"}

    async def open_chat(self, body: object) -> Answer:
        """A checked chat call."""
        chat = parse_body(ChatBody, _supported(body))
        self._check_openai(chat)
        self._refuse_text("messages", is_asked=True)
        limits = self._limits()
        top_logprobs = _chat_logprobs(chat)
        _check_tools(chat)
        prompt = await self._chat_prompt(chat)
        sampling = replace(sampling_params(chat, limits), logprobs=top_logprobs)
        form = ChatForm(
            f"chatcmpl-{uuid.uuid4().hex}",
            self.model_name,
            int(time.time()),
            self._tokenizer,
            has_logprobs=chat.logprobs,
            top_logprobs=max(0, top_logprobs),
            has_usage=_has_usage(chat),
        )
        per_prompt = [self._budget(chat, sampling, prompt, _chat_limit(chat), None, "messages", limits)]
        return self._answer(form, self._call(form.id, chat, [prompt], per_prompt, limits), chat.stream)

    async def open_completions(self, body: object) -> Answer:
        """A checked text completions call."""
        text = parse_body(CompletionBody, _supported(body))
        self._check_openai(text)
        if text.best_of is not None and text.best_of != text.n:
            wrong_value("best_of", "best_of", f"{shown(text.best_of)} is not n; every choice made is returned.")
        self._refuse_text("echo", is_asked=text.echo)
        limits = self._limits()
        prompts = await self._prompts(text.prompt, "prompt", limits)
        logprobs = NO_LOGPROBS if text.logprobs is None else text.logprobs
        sampling = replace(
            sampling_params(text, limits), logprobs=logprobs, prompt_logprobs=logprobs if text.echo else NO_LOGPROBS
        )
        form = CompletionForm(
            f"cmpl-{uuid.uuid4().hex}",
            self.model_name,
            int(time.time()),
            self._tokenizer,
            top_logprobs=text.logprobs,
            has_usage=_has_usage(text),
        )
        per_prompt = [
            self._budget(text, sampling, prompt, text.max_tokens, _DEFAULT_COMPLETION_TOKENS, "prompt", limits)
            for prompt in prompts
        ]
        call = self._call(form.id, text, prompts, per_prompt, limits)
        return self._answer(form, replace(call, echo=text.echo), text.stream)

    async def open_native(self, body: object) -> Answer:
        """A checked call in the native form."""
        native = parse_body(NativeBody, body)
        given, limits = native.sampling_params, self._limits()
        if (native.text is None) == (native.input_ids is None):
            raise InvalidRequestError("Give exactly one of 'text' and 'input_ids'.", param="text")
        param = "text" if native.input_ids is None else "input_ids"
        value = native.text if native.input_ids is None else native.input_ids
        prompts = await self._prompts(value, param, limits)
        is_list = given.n > 1 or (isinstance(value, list) and isinstance(value[0], str | list))
        form = NativeForm(
            uuid.uuid4().hex,
            self._tokenizer,
            is_list,
            has_logprobs=native.return_logprob,
            top_logprobs=native.top_logprobs_num,
        )
        call = self._native_call(form.id, native, prompts, param, limits)
        return self._answer(form, call, native.stream, has_fast_text=False)

    def _native_call(self, call_id: str, native: NativeBody, prompts: list[Prompt], param: str, limits: Limits) -> Call:
        given, prefix = native.sampling_params, "sampling_params."
        sampling = replace(
            sampling_params(given, limits, prefix=prefix),
            seed=given.sampling_seed,
            min_new_tokens=_checked_minimum(given.min_new_tokens, given.max_new_tokens, f"{prefix}min_new_tokens"),
            logprobs=native.top_logprobs_num if native.return_logprob else NO_LOGPROBS,
        )
        context = limits.context_length
        return Call(
            id=call_id,
            prompts=prompts,
            sampling=[
                replace(sampling, max_new_tokens=_answer_tokens(prompt, given.max_new_tokens, None, context, param))
                for prompt in prompts
            ],
            text=self._text_options(given, limits, prefix=prefix),
            n=checked_n(given.n, len(prompts), limits, f"{prefix}n"),
            salt=checked_text("cache_salt", "cache_salt", native.cache_salt),
            priority=native.priority,
        )

    def _call(
        self, call_id: str, body: OpenAIBody, prompts: list[Prompt], sampling: list[SamplingParams], limits: Limits
    ) -> Call:
        options = self._text_options(body, limits)
        return Call(
            id=call_id,
            prompts=prompts,
            sampling=sampling,
            text=replace(options, include_stop=options.include_stop or body.include_stop_str_in_output),
            n=checked_n(body.n, len(prompts), limits, "n"),
            salt=checked_text("cache_salt", "cache_salt", body.cache_salt),
            priority=body.priority,
        )

    def _answer(self, form: Form, call: Call, is_stream: bool, *, has_fast_text: bool = True) -> Answer:
        generation = Generation(call, self.backend, self._tokenizer, self.metrics, self._api.request_timeout_s)
        return Answer(form, generation, is_stream, has_fast_text and self._tokenizer.has_text)

    def _limits(self) -> Limits:
        info, api = self.backend.info, self._api
        return Limits(info.vocab_size, info.context_length, api.max_n, api.max_batch, api.max_stop)

    def _check_openai(self, body: OpenAIBody) -> None:
        self._check_model(body.model)
        check_response_format(body.response_format)
        options = body.stream_options
        if options is not None and not body.stream:
            wrong_value("stream_options", "stream_options", "it is only allowed when stream is true.")
        if options is not None and options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            wrong_value(param, param, "chunks are never padded here; leave it out or send false.")

    def _text_options(self, body: OpenAIBody | NativeSampling, limits: Limits, *, prefix: str = "") -> TextOptions:
        stop = stop_strings(body.stop, f"{prefix}stop", limits.max_stop)
        self._refuse_text(f"{prefix}stop", is_asked=bool(stop))
        return TextOptions(stop, include_stop=body.no_stop_trim, skip_special_tokens=body.skip_special_tokens)

    def _refuse_text(self, param: str, *, is_asked: bool) -> None:
        """Raise where `param` asks for text and there is no tokenizer."""
        if is_asked and not self._tokenizer.has_text:
            wrong_value(param, param, f"it needs text, and {REFUSAL}.")

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"The model '{shown(name)[1:-1]}' does not exist; this server has '{self.model_name}'."
            raise ModelNotFoundError(message, param="model")

    def _budget(
        self,
        body: OpenAIBody,
        sampling: SamplingParams,
        prompt: Prompt,
        asked: int | None,
        default: int | None,
        param: str,
        limits: Limits,
    ) -> SamplingParams:
        """The sampling of one prompt, with its own number of tokens."""
        tokens = _answer_tokens(prompt, asked, default, limits.context_length, param)
        minimum = _checked_minimum(body.min_tokens, tokens, "min_tokens")
        return replace(sampling, max_new_tokens=tokens, min_new_tokens=minimum, seed=body.seed)

    async def _prompts(self, value: object, param: str, limits: Limits) -> list[Prompt]:
        given = parse_prompts(value, param=param, vocab_size=limits.vocab_size, max_batch=limits.max_batch)
        self._refuse_text(param, is_asked=isinstance(given[0], str))
        return [await tokenise(self._tokenizer, prompt, param=param) for prompt in given]

    async def _chat_prompt(self, chat: ChatBody) -> Prompt:
        """The rendered messages as ids; a long conversation is rendered in a thread, off the streams' way."""
        messages = template_messages(chat.messages)
        if chat.continue_final_message:
            _check_continuation(chat, messages)

        def render() -> list[int]:
            return self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                template_kwargs=dict(chat.chat_template_kwargs),
            )

        is_long = num_chars(messages) > THREAD_CHARS
        return Prompt(await asyncio.to_thread(render) if is_long else render())


async def _run(answer: Answer) -> Any:
    return answer.chunks() if answer.is_stream else await answer.whole()


def _supported(body: object) -> object:
    """The body without the fields that ask for nothing; raises for those that ask for what is not there."""
    if not isinstance(body, Mapping):
        return body
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name not in UNSUPPORTED:
            kept[name] = value
            continue
        harmless, reason = UNSUPPORTED[name]
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            raise InvalidRequestError(f"'{name}' is not supported: {reason}.", param=name, code="unsupported_parameter")
    return kept


def _answer_tokens(prompt: Prompt, asked: int | None, default: int | None, context_length: int, param: str) -> int:
    return answer_tokens(len(prompt.tokens), asked, default, context_length=context_length, param=param)


def _checked_minimum(minimum: int, maximum: int, param: str) -> int:
    if minimum > maximum:
        wrong_value(param, param, f"{shown(minimum)} is above the {shown(maximum)} tokens that the answer may have.")
    return minimum


def _has_usage(body: OpenAIBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _chat_limit(chat: ChatBody) -> int | None:
    """The limit under its new or its old name."""
    if chat.max_tokens is None or chat.max_completion_tokens in (None, chat.max_tokens):
        return chat.max_completion_tokens if chat.max_tokens is None else chat.max_tokens
    raise InvalidRequestError(
        "max_tokens and max_completion_tokens disagree; they are two names of one limit, send one of them.",
        param="max_tokens",
    )


def _chat_logprobs(chat: ChatBody) -> int:
    if chat.top_logprobs is not None and not chat.logprobs:
        wrong_value("top_logprobs", "top_logprobs", "it is only allowed when logprobs is true.")
    return (chat.top_logprobs or 0) if chat.logprobs else NO_LOGPROBS


def _check_tools(chat: ChatBody) -> None:
    if chat.tools:
        raise InvalidRequestError("'tools' is not supported: tool calls are not supported yet.", param="tools")
    if chat.tool_choice not in (None, "none", "auto"):
        wrong_value("tool_choice", "tool_choice", f"{shown(chat.tool_choice)} needs tools, and none are given.")


def _check_continuation(chat: ChatBody, messages: list[dict[str, Any]]) -> None:
    if chat.add_generation_prompt and "add_generation_prompt" in chat.model_fields_set:
        param = "continue_final_message"
        wrong_value(param, param, "it excludes add_generation_prompt: the last message goes on, or a new one begins.")
    if messages[-1]["role"] != "assistant":
        wrong_value("continue_final_message", "continue_final_message", "the last message must be the assistant's.")
