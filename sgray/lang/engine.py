"""`Engine`: a model in this process, with SGLang's offline interface. It is also a backend for programs.

Needs no server and no Ray. Two threads while it lives, none after `shutdown`. The calls go through the same checks as
those of the server's native route, so arguments and answers mean the same.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from sgray.config import Config
from sgray.errors import EngineError
from sgray.lang.backend import LoopThread
from sgray.lang.chat_template import ChatTemplate, get_chat_template
from sgray.lang.engine_config import engine_config
from sgray.lang.errors import UnavailableError
from sgray.lang.local_backend import LocalEngine, LocalTransport
from sgray.lang.native import NativeBackend
from sgray.models.hub import resolve_model
from sgray.serve.openai.service import OpenAIService
from sgray.text.token_ids import TextCodec, TokenIds
from sgray.text.tokenizer import Tokenizer

ResultT = TypeVar("ResultT")
Prompts = str | Sequence[str]
Ids = Sequence[int] | Sequence[Sequence[int]]
Params = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Engine:
    """The model at `model_path` (the small default model if left out), loaded when made.

    Other arguments are leaves of the configuration under their own names (`dtype`, `mem_fraction_static`,
    `max_running_requests`, ...); `chat_template_name` is for programs. Raises ConfigError or ModelLoadError.
    """

    def __init__(
        self, model_path: str | None = None, *, chat_template_name: str | None = None, **arguments: Any
    ) -> None:
        given = arguments if model_path is None else {**arguments, "model_path": model_path}
        self.config = engine_config(given)
        template = None if chat_template_name is None else get_chat_template(chat_template_name)
        self.tokenizer, engine = _load(self.config)
        self.loop = LoopThread("sgray-texts")
        self.local = self.loop.run(_started(engine))
        self.service = OpenAIService(self.config, self.tokenizer, self.local)
        self._native = NativeBackend(LocalTransport(self.service), self.loop, template)
        self.loop.at_end(self.local.stop)
        self._is_shut = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # SGLang's offline interface.

    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Params | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """The answer to a prompt, or a list of them to a list: `text`, `output_ids` and `meta_info`.

        With `stream` an iterator of answers so far, which aborts when it is closed. Options are the other fields of the
        native route (`return_logprob`, `logprob_start_len`, `top_logprobs_num`, `rid`, `priority`, `cache_salt`, ...).
        Raises InvalidRequestError that names what is wrong.
        """
        body = _body(prompt, sampling_params, input_ids, options)
        self._check_open()
        if stream:
            return self._iterate(body)
        if _is_empty(prompt, input_ids):
            return []
        return self.loop.run(self.service.generate(body))

    async def async_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Params | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """`generate` for coroutines, on whatever event loop; with `stream` an async iterator."""
        body = _body(prompt, sampling_params, input_ids, options)
        self._check_open()
        if stream:
            return self._iterate_async(body)
        if _is_empty(prompt, input_ids):
            return []
        return await self._away(self.service.generate(body))

    def encode(self, prompt: Prompts, **options: Any) -> Any:
        """Always raises UnavailableError."""
        raise UnavailableError("embeddings are not available: the models served here generate text")

    async def async_encode(self, prompt: Prompts, **options: Any) -> Any:
        """Always raises UnavailableError."""
        return self.encode(prompt, **options)

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int],
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """For each item the probabilities of the labels after query and item."""
        self._check_open()
        return self.loop.run(self._score(query, items, label_token_ids, apply_softmax, item_first))

    async def async_score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int],
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """`score` for coroutines."""
        self._check_open()
        return await self._away(self._score(query, items, label_token_ids, apply_softmax, item_first))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests hold it."""
        self._check_open()
        return self.loop.run(self._native.flush())

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Stop the calls that were given this `rid`, or all."""
        if not rid and not abort_all:
            raise ValueError("give rid, the name of a call, or abort_all=True")
        self.loop.call(lambda: self.local.abort_calls(None if abort_all else rid))

    def get_server_info(self) -> dict[str, Any]:
        """The configuration and the load."""
        return self.service.control.server_info()

    def get_model_info(self) -> dict[str, Any]:
        """Which model this is."""
        return self.service.control.model_info()

    def shutdown(self) -> None:
        """End both threads; what runs gets an error. May be called twice."""
        self._is_shut = True
        self.loop.close()

    # For programs.

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template that replaces the model's own, if one does."""
        return self._native.chat_template

    @chat_template.setter
    def chat_template(self, template: ChatTemplate | None) -> None:
        self._native.chat_template = template

    @property
    def backend(self) -> NativeBackend:
        """This engine as programs see it."""
        return self._native

    async def _score(self, query: Any, items: Any, labels: Sequence[int], softmax: bool, first: bool) -> Any:
        body = {
            "query": query if isinstance(query, str) else list(query),
            "items": items if isinstance(items, str) else list(items),
            "label_token_ids": list(labels),
            "apply_softmax": softmax,
            "item_first": first,
        }
        return (await self.service.score(body))["scores"]

    def _iterate(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pump = self.loop.submit(self._pump(body, arrived))
        pump.add_done_callback(arrived.put)
        try:
            while not isinstance(chunk := arrived.get(), Future):
                yield chunk
            _finish(pump)
        finally:
            pump.cancel()

    async def _iterate_async(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        here, arrived = asyncio.get_running_loop(), asyncio.Queue[Any]()
        pump = self.loop.submit(self._pump(body, _Post(here, arrived)))
        pump.add_done_callback(_Post(here, arrived).put)
        try:
            while not isinstance(chunk := await arrived.get(), Future):
                yield chunk
            _finish(pump)
        finally:
            pump.cancel()

    async def _pump(self, body: Mapping[str, Any], arrived: Any) -> None:
        async for chunk in self._native.transport.stream({**body, "stream": True}):
            arrived.put(chunk)

    async def _away(self, work: Any) -> Any:
        """The result of work on the engine's own loop, on any loop."""
        return await asyncio.wrap_future(self.loop.submit(work))

    def _check_open(self) -> None:
        if self._is_shut:
            raise EngineError("this engine was shut down; make another one")


class _Post:
    """Puts things into the queue of another event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[Any]) -> None:
        self._loop = loop
        self._arrived = arrived

    def put(self, item: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)


def _finish(pump: Future[None]) -> None:
    """Raise what a stream has ended with, if not well."""
    if pump.cancelled():
        raise EngineError("the engine was shut down before the answer's end")
    pump.result()


def _load(config: Config) -> tuple[TextCodec, Any]:
    from sgray.engine.engine import Engine as StepEngine

    engine = StepEngine.load(config)
    if config.model.skip_tokenizer_init:
        return TokenIds(), engine
    path = config.model.tokenizer_path
    place = Path(engine.info.model_dir) if path is None else resolve_model(path)
    return Tokenizer.load(place, chat_template=config.model.chat_template), engine


async def _started(engine: Any) -> LocalEngine:
    return LocalEngine(engine)


def _body(
    prompt: Prompts | None, sampling_params: Params | None, input_ids: Ids | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a native call; what is None is left out."""
    fields = {
        "text": prompt if prompt is None or isinstance(prompt, str) else list(prompt),
        "input_ids": None if input_ids is None else [one if isinstance(one, int) else list(one) for one in input_ids],
        "sampling_params": sampling_params,
        **options,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _is_empty(prompt: Prompts | None, input_ids: Ids | None) -> bool:
    given = input_ids if prompt is None else prompt
    return given is not None and not isinstance(given, str) and len(given) == 0 and prompt is not None
