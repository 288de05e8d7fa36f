"""What each handler of the HTTP application takes and answers, in words and types: the source of the API's schema.

A route is an entry of the application's table; its handler is described here, once for all its paths. Nothing here
runs when a call comes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from sgray.serve.anthropic.answer_shapes import AnthropicEvent, AnthropicMessage, TokenCount
from sgray.serve.anthropic.fields import UNSUPPORTED_MESSAGES, MessagesBody, PromptBody
from sgray.serve.batches import shapes as batches
from sgray.serve.openai import answer_shapes as answers
from sgray.serve.openai.responses_fields import UNSUPPORTED_RESPONSES, ResponsesBody
from sgray.serve.openai.responses_shapes import ResponseAnswer, ResponseEvent
from sgray.serve.openai.schemas import (
    NATIVE_SAMPLING_UNSUPPORTED,
    NATIVE_UNSUPPORTED,
    UNSUPPORTED,
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NativeBody,
    NativeSampling,
    ScoreBody,
    TokenizeBody,
)
from sgray.serve.openai.validate import Unsupported

TEXT_PLAIN = "text/plain"
BYTES = "application/octet-stream"
FORM = "multipart/form-data"


@dataclass(frozen=True)
class Entry:
    """One route: its methods, split by a comma, its path, its handler, and whether it is the operator's alone."""

    verbs: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    is_admin: bool = False

    @property
    def methods(self) -> list[str]:
        """The HTTP methods."""
        return self.verbs.split(", ")

    @property
    def name(self) -> str:
        """The handler's name."""
        name: str = self.handler.__name__
        return name


@dataclass(frozen=True)
class Operation:
    """One handler. `answer` is a type whose JSON is sent, a media type where it is none, or None for an empty answer.

    `event` is the type of a streamed answer's events, where a body may ask for a stream. `parameters` are those of the
    query, as OpenAPI's objects. `names_model`: the call names a model, which may not be served. `waits`: a replica is
    asked, and there may be none, or no answer in time. `has_admin_part`: some of it is the operator's.
    `has_named_events`: events carry a name, and no mark comes after the last. `may_be_missing`: what the call names, or
    the whole API, may not be there. `body_kind` is the media type of the body.
    """

    title: str
    text: str = ""
    body: type[Body] | None = None
    answer: Any = None
    event: Any = None
    parameters: tuple[Mapping[str, Any], ...] = ()
    names_model: bool = False
    waits: bool = False
    has_admin_part: bool = False
    has_named_events: bool = False
    may_be_missing: bool = False
    body_kind: str = "application/json"


_FLUSH_TIMEOUT = {
    "name": "timeout",
    "in": "query",
    "required": False,
    "description": "Seconds to wait for requests that hold a cache; 0 asks once.",
    "schema": {"type": "number", "minimum": 0, "maximum": 600, "default": 0},
}


def _query(name: str, text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


_AFTER = _query("after", "The id behind which the list goes on: the `last_id` of the one before.", {"type": "string"})


def _limit(default: int, most: int) -> Mapping[str, Any]:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return _query("limit", "Most items.", schema)


OPERATIONS: Mapping[str, Operation] = {
    "chat": Operation(
        "A chat completion",
        "OpenAI's chat completions, with further fields of vLLM and SGLang.",
        body=ChatBody,
        answer=answers.ChatAnswer,
        event=answers.ChatChunk,
        names_model=True,
        waits=True,
    ),
    "completions": Operation(
        "A text completion",
        "OpenAI's completions: n choices for each prompt.",
        body=CompletionBody,
        answer=answers.CompletionAnswer,
        event=answers.CompletionChunk,
        names_model=True,
        waits=True,
    ),
    "responses": Operation(
        "A response",
        "OpenAI's responses. Nothing is stored: the whole conversation is the input.",
        body=ResponsesBody,
        answer=ResponseAnswer,
        event=ResponseEvent,
        has_named_events=True,
        names_model=True,
        waits=True,
    ),
    "messages": Operation(
        "A message",
        "Anthropic's messages. Its errors have Anthropic's shape, and an overload is a 529.",
        body=MessagesBody,
        answer=AnthropicMessage,
        event=AnthropicEvent,
        has_named_events=True,
        names_model=True,
        waits=True,
    ),
    "count_tokens": Operation(
        "How many tokens the prompt of a message has",
        "Anthropic's, as are its errors.",
        body=PromptBody,
        answer=TokenCount,
        names_model=True,
        waits=True,
    ),
    "generate": Operation(
        "Text or ids continued, in the native form",
        "SGLang's form. The answer is an array where the call gave an array of prompts or asked for several choices.",
        body=NativeBody,
        answer=answers.NativeAnswer | list[answers.NativeAnswer],
        event=answers.NativeAnswer,
        waits=True,
    ),
    "score": Operation(
        "The probabilities of label tokens after each item",
        body=ScoreBody,
        answer=answers.ScoreAnswer,
        names_model=True,
        waits=True,
    ),
    "tokenize": Operation(
        "The token ids of a text, of several, or of messages as a chat call would send them",
        body=TokenizeBody,
        answer=answers.TokenizeAnswer,
        names_model=True,
        waits=True,
    ),
    "detokenize": Operation(
        "The text of token ids, or of several lists of them",
        body=DetokenizeBody,
        answer=answers.DetokenizeAnswer,
        names_model=True,
        waits=True,
    ),
    "models": Operation("The served models", answer=answers.ModelList),
    "model": Operation("One served model", answer=answers.ModelCard, names_model=True),
    "ready": Operation("Whether a replica can take work", answer=answers.Status, waits=True),
    "live": Operation("Whether this process answers at all", answer=answers.Status),
    "health_generate": Operation("Whether a replica draws tokens, by one", answer=answers.Status, waits=True),
    "model_info": Operation("Which model is served", answer=answers.ModelInfo, waits=True),
    "server_info": Operation(
        "The version, the configuration and the load of each replica", answer=answers.ServerInfo, waits=True
    ),
    "metrics": Operation("Counts and times in Prometheus' text format", answer=TEXT_PLAIN),
    "abort_request": Operation(
        "Stop the calls of a name",
        "Good also for names that nobody has. To stop everybody's calls (`abort_all`) is the operator's.",
        body=AbortBody,
        has_admin_part=True,
    ),
    "flush_cache": Operation(
        "Empty the prefix caches",
        "Refused while requests wait or run.",
        parameters=(_FLUSH_TIMEOUT,),
        answer=TEXT_PLAIN,
        waits=True,
    ),
    "create_file": Operation(
        "A file uploaded",
        "The batch API is OpenAI's, and off unless the server has a directory for it.",
        body=batches.FileBody,
        body_kind=FORM,
        answer=batches.FileAnswer,
        may_be_missing=True,
    ),
    "files": Operation(
        "The files",
        parameters=(
            _AFTER,
            _limit(batches.MAX_FILES_LISTED, batches.MAX_FILES_LISTED),
            _query("order", "By age.", {"enum": ["asc", "desc"], "default": "desc"}),
            _query("purpose", "Only files with it.", {"type": "string"}),
        ),
        answer=batches.FileList,
        may_be_missing=True,
    ),
    "file": Operation("One file", answer=batches.FileAnswer, may_be_missing=True),
    "file_content": Operation("The content of a file", answer=BYTES, may_be_missing=True),
    "delete_file": Operation("A file deleted", answer=batches.DeletedFile, may_be_missing=True),
    "create_batch": Operation(
        "A batch begun",
        "The rows of a file, each a call, are answered in the slack of other calls.",
        body=batches.BatchBody,
        answer=batches.BatchAnswer,
        may_be_missing=True,
    ),
    "batches": Operation(
        "The batches, the newest first",
        parameters=(_AFTER, _limit(batches.BATCHES_LISTED, batches.MAX_BATCHES_LISTED)),
        answer=batches.BatchList,
        may_be_missing=True,
    ),
    "batch": Operation("One batch", answer=batches.BatchAnswer, may_be_missing=True),
    "cancel_batch": Operation(
        "The end of a batch asked for", "What is answered stays.", answer=batches.BatchAnswer, may_be_missing=True
    ),
    "openapi": Operation("This description", "OpenAPI 3.1, made from the types that check the bodies.", answer=dict),
}
"""The description of each handler by its name."""

REFUSED: Mapping[type[Body], Unsupported] = {
    ChatBody: UNSUPPORTED,
    CompletionBody: UNSUPPORTED,
    NativeBody: NATIVE_UNSUPPORTED,
    NativeSampling: NATIVE_SAMPLING_UNSUPPORTED,
    ResponsesBody: UNSUPPORTED_RESPONSES,
    MessagesBody: UNSUPPORTED_MESSAGES,
    PromptBody: UNSUPPORTED_MESSAGES,
}
"""Beside its own fields, a body may have these with the values that ask for nothing."""
