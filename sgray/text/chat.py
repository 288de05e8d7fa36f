"""Chat messages to prompt text, by the model's Jinja template.

transformers renders, in Jinja's immutable sandbox, so prompts equal its own. What is added here: messages in every form
of OpenAI's API reach the template in the form it can read, and whatever it refuses is the client's error.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from sgray.errors import InvalidRequestError, ModelLoadError

_PROBE = "sgrayprobe"

# What a template, which is a program, can raise on data that it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_MAX_REASON_LEN = 500


class ChatTemplate:
    """The template of one tokenizer: `source` if given, else the tokenizer's own, if it has one."""

    def __init__(self, pretrained: PreTrainedTokenizerFast, source: str | None) -> None:
        self._pretrained = pretrained
        if source is not None:
            pretrained.chat_template = source
            self._refuse_broken()

    @property
    def exists(self) -> bool:
        """Whether there is a template at all."""
        return bool(self._pretrained.chat_template)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any] | None,
    ) -> str:
        """The prompt; see `Tokenizer.render_chat`."""
        if not self.exists:
            raise InvalidRequestError("this model has no chat template; use completions, or set model.chat_template")
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        _refuse_reserved(template_kwargs or {})
        try:
            return self._render(
                [self._readable(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except _TEMPLATE_ERRORS as error:
            reason = str(error)[:_MAX_REASON_LEN]
            raise InvalidRequestError(f"the chat template refuses the messages: {reason}", param="messages") from error

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return str(self._pretrained.apply_chat_template(messages, tokenize=False, **kwargs))

    def _readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in a form that the template reads: text, or a list of text parts."""
        content = message.get("content")
        if isinstance(content, list):
            texts = [_part_text(part) for part in content]
            # A template without an idea of parts gets them as paragraphs.
            return message if self._reads_parts else {**message, "content": "\n".join(texts)}
        if not content:
            return {**message, "content": ""}
        return message if self._reads_text else {**message, "content": [{"type": "text", "text": content}]}

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether a list of text parts comes out as its text, neither an error nor the list's own notation."""
        text = self._probe([{"type": "text", "text": _PROBE}])
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    @cached_property
    def _reads_text(self) -> bool:
        """Whether content that is plain text comes out; where nothing comes out in either form, text it stays."""
        return _PROBE in self._probe(_PROBE) or not self._reads_parts

    def _refuse_broken(self) -> None:
        """A template that does not parse; one that refuses a lone user message is fine."""
        try:
            self._render([{"role": "user", "content": _PROBE}])
        except jinja2.TemplateSyntaxError as error:
            reason = f"the chat template file is not valid Jinja: {error} (line {error.lineno})"
            raise ModelLoadError(reason) from error
        except _TEMPLATE_ERRORS:
            return

    def _probe(self, content: Any) -> str:
        try:
            return self._render([{"role": "user", "content": content}])
        except _TEMPLATE_ERRORS:
            return ""


def _part_text(part: Any) -> str:
    """The text of a text part; anything else cannot reach a model of text."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequestError(f"this model takes text alone, not content parts of type {kind!r}", param="messages")


def _refuse_reserved(template_kwargs: dict[str, Any]) -> None:
    """Variables of a request may not replace the template or change how it is applied."""
    reserved = {*inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters, "messages"}
    if taken := sorted(reserved & set(template_kwargs)):
        raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs")
