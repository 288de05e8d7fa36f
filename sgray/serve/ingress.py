"""The ingress: an actor of Serve that turns HTTP and handle calls into engine requests and text.

It learns the replicas from Serve's own routing table and talks to them over links; Serve's handle to the replicas
carries nothing but the wish to have one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sgray.config import Config, KeyHashes, environment_keys
from sgray.errors import OverloadedError
from sgray.models.hub import resolve_model
from sgray.serve.batches.batches import Batches
from sgray.serve.dispatch import Dispatcher
from sgray.serve.openai.app import app_of
from sgray.serve.openai.keys import Keyring
from sgray.serve.openai.service import OpenAIService
from sgray.serve.packed import PackedBackend
from sgray.serve.table import Endpoint, table_of
from sgray.serve.tracing import CallTraces, spans_of
from sgray.text.token_ids import TextCodec, TokenIds
from sgray.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Answer = dict[str, Any] | AsyncIterator[dict[str, Any]]


class Ingress:
    """One ingress. `values` are those of a `Config`; `replicas` is the handle of the engine deployment.

    `keys` are those in the environment of whoever deployed; those in the environment of its own process count as well.
    Keys close the HTTP routes alone: who holds a handle is inside the cluster.

    From other Ray code: `handle = serve.get_app_handle("sgray")`, then `handle.chat.remote(body)` with the body of the
    HTTP route; for a body with `"stream": True`, `handle.options(stream=True).chat.remote(body)`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, values: dict[str, Any], replicas: DeploymentHandle, keys: KeyHashes
    ) -> None:
        config = Config.parse(values)
        own = environment_keys()
        self._config = config
        self._keyring = Keyring(config.api, KeyHashes(keys.api + own.api, keys.admin + own.admin))
        tokenizer = await asyncio.to_thread(_load_tokenizer, config)
        self._loop = asyncio.get_running_loop()
        self._spans = spans_of(config, "ingress")
        self._traces = None if self._spans is None else CallTraces(self._spans)
        self._dispatcher = Dispatcher(
            policy=config.serve.routing_policy,
            uses_cache=not config.memory.disable_radix_cache,
            random_seed=config.schedule.random_seed,
            wake=self._wake,
            watcher=self._traces,
        )
        self._ping = replicas.options(method_name="ping")
        self._waking: asyncio.Task[None] | None = None
        table_of(replicas.app_name, replicas.deployment_name).subscribe(self._on_table)
        self._service = OpenAIService(config, tokenizer, self._dispatcher)
        self._batches = await asyncio.to_thread(Batches.over, self._service, config)
        self._packed = OpenAIService(config, tokenizer, PackedBackend(self._dispatcher))
        self._packed.metrics = self._service.metrics
        if config.serve.min_replicas:
            self._wake()
        if self._batches is not None:
            self._batches.start()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve: the HTTP application."""
        patient = Middleware(_Patient, dispatcher=self._dispatcher)
        return app_of(
            self._service,
            self._config,
            self._keyring,
            batches=self._batches,
            behind_keys=[patient],
            traces=self._traces,
        )

    async def chat(self, body: Mapping[str, Any]) -> Answer:
        """A chat completion, as POST /v1/chat/completions."""
        await self._dispatcher.wait_known()
        return await self._packed.chat(body)

    async def completions(self, body: Mapping[str, Any]) -> Answer:
        """A text completion, as POST /v1/completions."""
        await self._dispatcher.wait_known()
        return await self._packed.completions(body)

    async def responses(self, body: Mapping[str, Any]) -> Answer:
        """A response, as POST /v1/responses."""
        await self._dispatcher.wait_known()
        return await self._packed.responses(body)

    async def messages(self, body: Mapping[str, Any]) -> Answer:
        """A message of Anthropic's API, as POST /v1/messages."""
        await self._dispatcher.wait_known()
        return await self._packed.messages(body)

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The native form, as POST /generate."""
        await self._dispatcher.wait_known()
        return await self._packed.generate(body)

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As POST /v1/tokenize."""
        await self._dispatcher.wait_known()
        return await self._service.tokenize(body)

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As POST /v1/detokenize."""
        await self._dispatcher.wait_known()
        return await self._service.detokenize(body)

    async def abort_calls(self, name: str) -> None:
        """As POST /abort_request of a name."""
        self._dispatcher.abort_calls(name)

    async def end_programs(self, programs: Sequence[str]) -> None:
        """As POST /end_programs."""
        self._dispatcher.end_programs(programs)

    async def flush_cache(self) -> bool:
        """As POST /flush_cache; False where requests hold a cache."""
        return not await self._dispatcher.flush()

    async def server_info(self) -> dict[str, Any]:
        """As GET /server_info."""
        await self._dispatcher.wait_known()
        return self._service.control.server_info()

    async def __del__(self) -> None:
        """Called by Serve before the end, when no call runs any more."""
        if self._batches is not None:
            await self._batches.close()
        await self._dispatcher.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def _on_table(self, endpoints: dict[str, Endpoint]) -> None:
        """Called in whatever thread Serve's router runs."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatcher.set_replicas, endpoints)

    def _wake(self) -> None:
        """Make Serve want a replica, by a call that waits for one. It also starts Serve's router in this process."""
        if self._waking is None or self._waking.done():
            self._waking = self._loop.create_task(self._call_any_replica())

    async def _call_any_replica(self) -> None:
        try:
            await self._ping.remote()
        except Exception as error:  # noqa: BLE001 - whatever Serve raises, the table tells when a replica is there
            logger.warning("no replica answered: %s", error)


class _Patient:
    """Holds calls that come before the first replica was ever seen, instead of refusing them."""

    def __init__(self, app: ASGIApp, dispatcher: Dispatcher) -> None:
        self._app = app
        self._dispatcher = dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, in the end also without a replica: the application answers that."""
        if scope["type"] == "http" and scope["method"] == "POST":
            try:
                await self._dispatcher.wait_known()
            except OverloadedError as error:
                logger.warning("%s", error)
        await self._app(scope, receive, send)


def _load_tokenizer(config: Config) -> TextCodec:
    model = config.model
    if model.skip_tokenizer_init:
        return TokenIds()
    if model.tokenizer_path is not None:
        path = resolve_model(model.tokenizer_path)
    else:
        path = resolve_model(model.model_path, revision=model.revision)
    return Tokenizer.load(path, chat_template=model.chat_template)
