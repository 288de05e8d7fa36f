"""Any endpoint of OpenAI's form as a backend: chat completions for messages, completions for bare text.

What only sgray's native form can do is asked for in the fields that OpenAI's form has for it, or refused here; nothing
is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sgray.config import environment_openai_key
from sgray.lang.backend import ChoiceScores, Completion, LoopThread, OnText
from sgray.lang.chat_template import ChatTemplate
from sgray.lang.errors import EndpointError, UnavailableError
from sgray.lang.expressions import Sampling
from sgray.lang.http import HttpClient
from sgray.lang.transcript import Prompt

OPENAI_URL = "https://api.openai.com/v1"
_SAME_NAMES = ("n", "stop", "temperature", "top_p", "frequency_penalty", "presence_penalty")
# Fields of other servers than OpenAI's, with the values that ask for nothing.
_EXTENSIONS: Mapping[str, tuple[str, Any]] = {
    "min_new_tokens": ("min_tokens", 0),
    "stop_token_ids": ("stop_token_ids", None),
    "top_k": ("top_k", -1),
    "min_p": ("min_p", 0.0),
    "ignore_eos": ("ignore_eos", False),
}
_REFUSED = ("regex", "ebnf", "stop_regex", "return_logprob", "logprob_start_len", "top_logprobs_num")


class OpenAI:
    """The model `model_name` of an endpoint; nothing is sent before a program runs.

    `is_chat_model` True refuses prompts that are not messages, False those that are; None takes both.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *,
        base_url: str = OPENAI_URL,
        api_key: str | None = None,
    ) -> None:
        if is_azure:
            raise UnavailableError(
                "Azure's own form is not available; give the base_url of its OpenAI-compatible endpoint"
            )
        key = environment_openai_key() if api_key is None and base_url == OPENAI_URL else api_key
        self.loop = LoopThread()
        self.model_name = model_name
        self.is_chat_model = is_chat_model
        self.chat_template = chat_template
        self._limit_name = "max_completion_tokens" if base_url == OPENAI_URL else "max_tokens"
        self._client = HttpClient(base_url, self.loop, api_key=key)

    @property
    def backend(self) -> OpenAI:
        """Itself."""
        return self

    async def complete(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None, program: str = ""
    ) -> Completion:
        """See Backend. The endpoint is not told of programs."""
        is_chat = not prompt.is_text and self.chat_template is None
        body = self._chat(prompt) if is_chat else self._text(prompt)
        body |= self._sampling(sampling, is_chat=is_chat)
        path = "/chat/completions" if is_chat else "/completions"
        if on_text is not None:
            return await self._streamed(path, body, on_text)
        answer = await self._client.post(path, body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return Completion([_text_of(choice) for choice in choices], [_meta(answer, choice) for choice in choices])

    async def score_choices(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, program: str = ""
    ) -> ChoiceScores:
        """See Backend. It needs an endpoint that echoes a text with its logprobs, as sgray's and vLLM's do."""
        if not prompt.is_text and self.chat_template is None:
            raise UnavailableError(
                "select inside messages is not available on an OpenAI endpoint, which does not score them; use "
                "RuntimeEndpoint for a server of sgray's, or select in bare text"
            )
        if unconditional:
            raise UnavailableError("unconditional_likelihood_normalized is not available on an OpenAI endpoint")
        text = self._text(prompt)["prompt"] or "\n"
        found = await self._echo([text + choice for choice in choices])
        start = max(1, min(_first_beyond(entries, len(text)) for entries in found))
        return ChoiceScores([[[entry[0], None, entry[1]] for entry in entries[start:]] for entries in found])

    async def prefetch(self, prompt: Prompt, program: str) -> None:
        """Nothing: an endpoint may charge for what nobody reads."""

    def end_program(self, program: str) -> None:
        """Nothing: there is nobody to tell."""

    async def render(self, prompt: Prompt) -> str:
        """The texts and messages, one after the other: only the endpoint knows how its model reads them."""
        if self.chat_template is not None:
            return self.chat_template.render(prompt)
        parts = [part if isinstance(part, str) else f"{part.role}: {part.content}\n" for part in prompt.parts]
        return "".join(parts)

    async def flush(self) -> bool:
        """Never succeeds."""
        raise UnavailableError("an OpenAI endpoint has no way to empty its cache")

    async def server_info(self) -> dict[str, Any]:
        """The models that it lists."""
        info: dict[str, Any] = await self._client.get("/models")
        return info

    def close(self) -> None:
        """See Backend."""
        self.loop.close()

    def _chat(self, prompt: Prompt) -> dict[str, Any]:
        if self.is_chat_model is False:
            raise UnavailableError(f"{self.model_name} was said to be no chat model, but the program writes messages")
        if not prompt.is_chat:
            raise UnavailableError("text beside messages cannot be sent to an OpenAI endpoint; put it into a message")
        *before, last = prompt.turns
        if last.is_open and last.role != "assistant":
            raise UnavailableError(f"an OpenAI endpoint writes messages of the assistant alone, not of {last.role!r}")
        told = [*before, last] if last.content or not last.is_open else before
        body: dict[str, Any] = {
            "model": self.model_name,
            "messages": [{"role": turn.role, "content": turn.content} for turn in told],
        }
        if (
            last.is_open and last.content
        ):  # sgray, SGLang and vLLM can go on with a message; others say that they cannot
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _text(self, prompt: Prompt) -> dict[str, Any]:
        if self.is_chat_model:
            raise UnavailableError(
                f"{self.model_name} is a chat model: generate inside assistant(...), after a message of the user"
            )
        text = prompt.text if self.chat_template is None else self.chat_template.render(prompt)
        return {"model": self.model_name, "prompt": text}

    def _sampling(self, sampling: Sampling, *, is_chat: bool) -> dict[str, Any]:
        given = sampling.given()
        for name in _REFUSED:
            if given.get(name):
                raise UnavailableError(f"{name} is not available on an OpenAI endpoint")
        body = {name: given[name] for name in _SAME_NAMES if name in given}
        body |= {
            there: given[here] for here, (there, nothing) in _EXTENSIONS.items() if given.get(here, nothing) != nothing
        }
        if "max_new_tokens" in given:
            body[self._limit_name if is_chat else "max_tokens"] = given["max_new_tokens"]
        if "json_schema" in given:
            body["response_format"] = _response_format(given["json_schema"])
        return body

    async def _streamed(self, path: str, body: Mapping[str, Any], on_text: OnText) -> Completion:
        texts: dict[int, str] = {}
        meta: dict[int, dict[str, Any]] = {}
        async with aclosing(self._client.events(path, {**body, "stream": True})) as events:  # type: ignore[type-var]
            async for event in events:
                for choice in event["choices"]:
                    index, piece = choice["index"], _text_of(choice)
                    texts[index] = texts.get(index, "") + piece
                    meta[index] = _meta(event, choice)
                    if index == 0 and piece:
                        on_text(piece)
        if not texts:
            raise EndpointError("the answer has no choices")
        return Completion([texts[index] for index in sorted(texts)], [meta[index] for index in sorted(texts)])

    async def _echo(self, texts: list[str]) -> list[list[list[Any]]]:
        """For each text the entries [logprob, token, where it begins] of its tokens."""
        body = {
            "model": self.model_name,
            "prompt": texts,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "temperature": 0,
        }
        answer = await self._client.post("/completions", body)
        found = []
        for choice in sorted(answer["choices"], key=lambda one: int(one["index"])):
            logprobs = choice["logprobs"]
            columns = (logprobs["token_logprobs"], logprobs["tokens"], logprobs["text_offset"])
            found.append([list(entry) for entry in zip(*columns, strict=True)])
        return found


def _first_beyond(entries: Sequence[Sequence[Any]], length: int) -> int:
    """The first token whose text ends beyond that many characters."""
    ends = [entry[2] for entry in entries[1:]]
    return next((number for number, end in enumerate(ends) if end > length), len(ends))


def _text_of(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or "")


def _meta(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    usage = answer.get("usage") or {}
    return {"id": answer.get("id"), "finish_reason": choice.get("finish_reason"), **usage}


def _response_format(schema: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(schema), "strict": True}}
