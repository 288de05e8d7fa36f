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
from sgray.serve.anthropic import fields as anthropic_fields
from sgray.serve.anthropic.errors import error_chunks
from sgray.serve.anthropic.form import MessageForm
from sgray.serve.openai.answers import Answer
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.blocks import BlockReader
from sgray.serve.openai.chat import ChatForm
from sgray.serve.openai.completions import CompletionForm
from sgray.serve.openai.constraints import Held, Thinking, constraint_of, grammar_of, with_calls
from sgray.serve.openai.control import Control
from sgray.serve.openai.forms import Form, Json, RunningUsage
from sgray.serve.openai.generation import Call, Generation
from sgray.serve.openai.messages import check_counts, num_chars, template_messages
from sgray.serve.openai.metrics import ApiMetrics
from sgray.serve.openai.native import NativeForm
from sgray.serve.openai.native_fields import (
    is_list_of_prompts,
    name_answers,
    native_sampling,
    parse_logprobs,
    parse_native,
    parse_programs,
    parse_sampling,
)
from sgray.serve.openai.prompts import THREAD_CHARS, Prompt, answer_tokens, parse_prompts, tokenise
from sgray.serve.openai.reading import PROMPT_END_TOKENS, Reading, is_inside
from sgray.serve.openai.responses_fields import CHAT_NAMES, chat_body, parse_responses
from sgray.serve.openai.responses_form import response_form
from sgray.serve.openai.sampling import (
    Limits,
    TextOptions,
    checked_n,
    sampling_params,
    stop_strings,
)
from sgray.serve.openai.schemas import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    Constrained,
    NativeSampling,
    OpenAIBody,
    ScoreBody,
    StreamOptions,
)
from sgray.serve.openai.scores import Scoring, score_call, score_prompts
from sgray.serve.openai.sse import DataEvents, Framing, NamedEvents
from sgray.serve.openai.token_calls import (
    chat_fields,
    decode_tokens,
    encode_prompt,
    parse_detokenize,
    parse_tokenize,
    tokens_json,
)
from sgray.serve.openai.tools import ToolUse, tool_use
from sgray.serve.openai.translation import in_words_of
from sgray.serve.openai.validate import checked_text, parse_body, shown, without_unsupported, wrong_value
from sgray.text.reasoning import REASONING_FORMATS
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
        self.control = Control(config, backend)
        self._tokenizer = tokenizer
        self._created = int(time.time())

    async def chat(self, body: Mapping[str, Any]) -> Json | AsyncIterator[Json]:
        """A chat completion: the answer, or its chunks where the body says `stream`."""
        return await _run(await self.open_chat(body))

    async def responses(self, body: Mapping[str, Any]) -> Json | AsyncIterator[Json]:
        """A response: the answer, or its events where the body says `stream`."""
        return await _run(await self.open_responses(body))

    async def messages(self, body: Mapping[str, Any]) -> Json | AsyncIterator[Json]:
        """A message of Anthropic's API: the answer, or its events where the body says `stream`."""
        return await _run(await self.open_messages(body))

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

    async def tokenize(self, body: object) -> Json:
        """The ids of a text, of several, or of messages as a chat call would send them."""
        given = parse_tokenize(body)
        self._check_given_model(given.model)
        self._refuse_text("prompt" if given.messages is None else "messages", is_asked=True)
        tokens: list[int] | list[list[int]]
        if given.messages is None:
            tokens = await encode_prompt(given, self._tokenizer, self._api.max_batch)
        else:
            chat = parse_body(ChatBody, chat_fields(given, self.model_name))
            tokens = (await self._chat_prompt(chat, tool_use(chat, self._api.tool_call_parser))).tokens
        text_of = self._tokenizer.token_text if given.return_token_strs else None
        return tokens_json(tokens, self.backend.info.context_length, text_of)

    async def detokenize(self, body: object) -> Json:
        """The text of ids, or the texts of several lists of them."""
        given = parse_detokenize(body, self.backend.info.vocab_size, self._api.max_batch)
        self._check_given_model(given.model)
        self._refuse_text("tokens", is_asked=True)
        return await decode_tokens(given, self._tokenizer)

    async def score(self, body: object) -> Json:
        """The probabilities of label tokens after each item."""
        return await (await self.open_score(body)).whole()

    async def open_score(self, body: object) -> Scoring:
        """A checked call for scores."""
        given = parse_body(ScoreBody, body)
        self._check_given_model(given.model)
        self._refuse_text("query", is_asked=isinstance(given.query, str))
        prompts = await score_prompts(given, self._tokenizer, self._limits())
        call = score_call(f"score-{uuid.uuid4().hex}", prompts, given.label_token_ids)
        return Scoring(given, self.model_name, prompts, self._generation(call))

    async def open_chat(self, body: object) -> Answer:
        """A checked chat call."""
        chat = parse_body(ChatBody, _supported(body))
        call, reading = await self._chat_call(chat, f"chatcmpl-{uuid.uuid4().hex}")
        form = ChatForm(
            call.id,
            self.model_name,
            int(time.time()),
            self._tokenizer,
            has_logprobs=chat.logprobs,
            top_logprobs=chat.top_logprobs or 0,
            has_usage=_has_usage(chat),
            reading=reading,
        )
        return self._answer(form, call, chat.stream, options=chat.stream_options, has_fast_text=reading.is_plain)

    async def _chat_call(self, chat: ChatBody, call_id: str, *, is_capped: bool = False) -> tuple[Call, Reading]:
        """What the engine is asked, and how its answers are read, whatever form they get.

        With `is_capped` a limit on the answer's tokens beyond what the context leaves is no error.
        """
        self._check_openai(chat)
        self._refuse_text("messages", is_asked=True)
        limits = self._limits()
        logprobs = _chat_logprobs(chat)
        tools = tool_use(chat, self._api.tool_call_parser)
        prompt = await self._chat_prompt(chat, tools)
        sampling = replace(sampling_params(chat, limits), logprobs=logprobs)
        reading = self._reading(chat, prompt, tools)
        grammar = await self._grammar(chat, thinking=self._thinking(reading), tools=tools)
        asked = _chat_limit(chat)
        if is_capped and asked is not None:
            asked = min(asked, max(1, limits.context_length - len(prompt.tokens)))
        per_prompt = [self._budget(chat, sampling, prompt, asked, None, "messages", limits)]
        call = replace(self._call(call_id, chat, [prompt], per_prompt, limits), grammars=[grammar])
        if reading.has_special_tokens:  # whatever the call says: they mark its calls or its reasoning
            call = replace(call, text=[replace(options, skip_special_tokens=False) for options in call.text])
        return call, reading

    async def open_responses(self, body: object) -> Answer:
        """A checked call of the Responses API: a chat call in another form."""
        given = parse_responses(body)
        fields = chat_body(given)
        with in_words_of(CHAT_NAMES):
            chat = parse_body(ChatBody, _supported(fields))
            call, reading = await self._chat_call(chat, f"resp_{uuid.uuid4().hex}")
        form = response_form(given, call.id, self.model_name, self._tokenizer, reading)
        return self._answer(form, call, given.stream, has_fast_text=False, framing=NamedEvents(form.failed))

    async def open_messages(self, body: object) -> Answer:
        """A checked call of Anthropic's Messages API: a chat call in another form."""
        given = anthropic_fields.parse_messages(body)
        fields = anthropic_fields.chat_body(given, self._api.reasoning_parser)
        with in_words_of(anthropic_fields.CHAT_NAMES):
            chat = parse_body(ChatBody, _supported(fields))
            call, reading = await self._chat_call(chat, f"msg_{uuid.uuid4().hex}", is_capped=True)
        generation = self._generation(call)
        form = MessageForm(
            call.id,
            self.model_name,
            BlockReader(reading),
            generation.usage,
            is_capped=call.sampling[0].max_new_tokens < given.max_tokens,
            hides_thoughts=given.thinking is not None and given.thinking.display == "omitted",
        )
        return Answer(form, generation, given.stream, has_fast_text=False, framing=NamedEvents(error_chunks))

    async def count_tokens(self, body: object) -> Json:
        """How many tokens the prompt of a call of Anthropic's API has."""
        given = anthropic_fields.parse_count(body)
        fields = anthropic_fields.chat_body(given, self._api.reasoning_parser)
        with in_words_of(anthropic_fields.CHAT_NAMES):
            chat = parse_body(ChatBody, _supported(fields))
            self._check_openai(chat)
            self._refuse_text("messages", is_asked=True)
            prompt = await self._chat_prompt(chat, tool_use(chat, self._api.tool_call_parser))
        return {"input_tokens": len(prompt.tokens)}

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
        grammars = [await self._grammar(text)] * len(prompts)
        call = replace(self._call(form.id, text, prompts, per_prompt, limits), echo=text.echo, grammars=grammars)
        return self._answer(form, call, text.stream, options=text.stream_options)

    async def open_native(self, body: object) -> Answer:
        """A checked call in the native form."""
        native, limits = parse_native(body), self._limits()
        self._refuse_text("return_text_in_logprobs", is_asked=native.return_text_in_logprobs)
        param = "text" if native.input_ids is None else "input_ids"
        value = native.text if native.input_ids is None else native.input_ids
        prompts = await self._prompts(value, param, limits)
        count = len(prompts) if is_list_of_prompts(value) else None
        given = parse_sampling(native, count)
        n = checked_n(given[0].n, len(prompts), limits, "sampling_params.n")
        names = name_answers(native.rid, count, n)
        lengths = [len(prompt.tokens) for prompt in prompts]
        asks = parse_logprobs(native, given, count, lengths, limits.vocab_size)
        is_list = count is not None or n > 1
        intervals = [one.stream_interval for one in given]
        form = NativeForm(
            names.answers, asks, self._tokenizer, is_list, native.return_text_in_logprobs, intervals=intervals
        )
        call = Call(
            id=names.call,
            prompts=prompts,
            sampling=[
                native_sampling(one, ask, prompt, limits, param)
                for one, ask, prompt in zip(given, asks, prompts, strict=True)
            ],
            text=[self._text_options(one, limits, prefix="sampling_params.") for one in given],
            n=n,
            names=names.answers if names.is_given else (),
            keeps_aborted=True,
            salt=native.cache_salt,
            priority=native.priority,
            grammars=await self._native_grammars(given, is_list=isinstance(native.sampling_params, list)),
            programs=parse_programs(native, count),
            computes_prompts=True,
        )
        return self._answer(form, call, native.stream, has_fast_text=False)

    def _call(
        self, call_id: str, body: OpenAIBody, prompts: list[Prompt], sampling: list[SamplingParams], limits: Limits
    ) -> Call:
        options = self._text_options(body, limits)
        return Call(
            id=call_id,
            prompts=prompts,
            sampling=sampling,
            text=[replace(options, include_stop=options.include_stop or body.include_stop_str_in_output)]
            * len(prompts),
            n=checked_n(body.n, len(prompts), limits, "n"),
            salt=checked_text("cache_salt", "cache_salt", body.cache_salt),
            priority=body.priority,
        )

    def _answer(
        self,
        form: Form,
        call: Call,
        is_stream: bool,
        *,
        options: StreamOptions | None = None,
        has_fast_text: bool = True,
        framing: Framing | None = None,
    ) -> Answer:
        generation = self._generation(call)
        if options is not None and options.continuous_usage_stats:
            form, has_fast_text = RunningUsage(form, generation.usage), False
        has_fast_text = has_fast_text and self._tokenizer.has_text
        return Answer(form, generation, is_stream, has_fast_text, framing or DataEvents())

    def _generation(self, call: Call) -> Generation:
        return Generation(call, self.backend, self._tokenizer, self.metrics, self._api.request_timeout_s)

    def _limits(self) -> Limits:
        info, api = self.backend.info, self._api
        return Limits(
            info.vocab_size,
            info.context_length,
            api.max_n,
            api.max_batch,
            api.max_stop,
            api.max_stop_chars,
            len(info.end_ids),
        )

    def _check_openai(self, body: OpenAIBody) -> None:
        self._check_model(body.model)
        options = body.stream_options
        if options is not None and not body.stream:
            wrong_value("stream_options", "stream_options", "it is only allowed when stream is true.")
        if options is not None and options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            wrong_value(param, param, "chunks are never padded here; leave it out or send false.")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            param = "stream_options.continuous_usage_stats"
            wrong_value(param, param, "it is only allowed when stream_options.include_usage is true.")

    def _text_options(self, body: OpenAIBody | NativeSampling, limits: Limits, *, prefix: str = "") -> TextOptions:
        stop = stop_strings(body.stop, f"{prefix}stop", limits)
        self._refuse_text(f"{prefix}stop", is_asked=bool(stop))
        return TextOptions(stop, include_stop=body.no_stop_trim, skip_special_tokens=body.skip_special_tokens)

    async def _grammar(
        self, body: Constrained, *, prefix: str = "", thinking: Thinking | None = None, tools: ToolUse | None = None
    ) -> Held | None:
        """What the text must be, if anything; written in a thread, off the streams' way."""
        constraint = constraint_of(body, prefix)
        constraint = constraint if tools is None else with_calls(constraint, tools)
        if constraint is None:
            return None
        self._refuse_text(constraint.param, is_asked=True)
        return Held(await asyncio.to_thread(grammar_of, constraint, thinking), constraint.param)

    async def _native_grammars(self, given: list[NativeSampling], *, is_list: bool) -> list[Held | None]:
        """One a prompt; written once where all prompts have the same fields."""
        if not is_list:
            return [await self._grammar(given[0], prefix="sampling_params.")] * len(given)
        return [await self._grammar(one, prefix=f"sampling_params[{index}].") for index, one in enumerate(given)]

    def _thinking(self, reading: Reading) -> Thinking | None:
        """The reasoning that an answer has before it, or may have."""
        form = reading.reasoning
        if form is None or reading.is_inside is False:
            return None
        if not (form.is_forced if reading.is_inside is None else reading.is_inside):
            return Thinking(form.begin, form.end)
        end = tuple(self._tokenizer.encode(form.end, add_special_tokens=False))
        return Thinking(None, form.end, end if len(end) == 1 else ())

    def _refuse_text(self, param: str, *, is_asked: bool) -> None:
        """Raise where `param` asks for text and there is no tokenizer."""
        if is_asked and not self._tokenizer.has_text:
            wrong_value(param, param, f"it needs text, and {REFUSAL}.")

    def _check_given_model(self, name: str | None) -> None:
        """Where the model may be left out, since there is one."""
        if name is not None:
            self._check_model(name)

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

    def _reading(self, chat: ChatBody, prompt: Prompt, tools: ToolUse) -> Reading:
        """How the answers are read; raises where reasoning must be told apart and this server was not told how."""
        # The calls and the reasoning of gpt-oss are messages of one format.
        name = self._api.reasoning_parser or ("gpt-oss" if self._api.tool_call_parser == "gpt-oss" else None)
        if name is None:
            if chat.separate_reasoning:
                reason = f"set api.reasoning_parser (--reasoning-parser) to one of {', '.join(REASONING_FORMATS)}."
                wrong_value(
                    "separate_reasoning", "separate_reasoning", f"this server cannot tell reasoning apart; {reason}"
                )
            return Reading(tools=tools)
        end = self._tokenizer.decode(prompt.tokens[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        continued = template_messages(chat.messages[-1:])[0] if chat.continue_final_message else None
        return Reading(
            REASONING_FORMATS[name],
            is_inside(REASONING_FORMATS[name], end, continued),
            separates=chat.separate_reasoning is not False,
            streams=chat.stream_reasoning,
            tools=tools,
        )

    async def _chat_prompt(self, chat: ChatBody, tools: ToolUse) -> Prompt:
        """The rendered messages as ids; a long conversation is rendered in a thread, off the streams' way."""
        check_counts(chat.messages, self._api.max_messages, self._api.max_content_parts)
        messages = template_messages(chat.messages)
        if chat.continue_final_message:
            _check_continuation(chat, messages)

        def render() -> list[int]:
            return self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                tools=tools.tools or None,
                template_kwargs=dict(chat.chat_template_kwargs),
            )

        is_long = num_chars(messages) + tools.num_chars > THREAD_CHARS
        return Prompt(await asyncio.to_thread(render) if is_long else render())


async def _run(answer: Answer) -> Any:
    return answer.chunks() if answer.is_stream else await answer.whole()


def _supported(body: object) -> object:
    """The body without the fields that ask for nothing; raises for those that ask for what is not there."""
    return without_unsupported(body, UNSUPPORTED)


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


def _check_continuation(chat: ChatBody, messages: list[dict[str, Any]]) -> None:
    if chat.add_generation_prompt and "add_generation_prompt" in chat.model_fields_set:
        param = "continue_final_message"
        wrong_value(param, param, "it excludes add_generation_prompt: the last message goes on, or a new one begins.")
    if messages[-1]["role"] != "assistant":
        wrong_value("continue_final_message", "continue_final_message", "the last message must be the assistant's.")
