"""A running sgray server as a backend, over HTTP; and any other server with SGLang's native routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sgray.errors import InvalidRequestError
from sgray.lang.backend import LoopThread
from sgray.lang.chat_template import ChatTemplate, get_chat_template
from sgray.lang.gathering import GatheringTransport
from sgray.lang.http import HttpClient
from sgray.lang.native import NativeBackend

_PATHS = {"generate": "/generate", "tokenize": "/v1/tokenize", "detokenize": "/v1/detokenize"}


class HttpTransport:
    """Carries calls to a server."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def call(self, name: str, body: Mapping[str, Any]) -> Any:
        """See Transport."""
        return await self._client.post(_PATHS[name], body)

    def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See Transport."""
        return self._client.events(_PATHS["generate"], body)

    async def abort(self, name: str) -> None:
        """See Transport."""
        await self._client.post_empty("/abort_request", {"rid": name})

    async def end_programs(self, programs: Sequence[str]) -> None:
        """See Transport."""
        await self._client.post_empty("/end_programs", {"program_ids": list(programs)})

    async def flush(self) -> bool:
        """See Transport."""
        try:
            await self._client.post_empty("/flush_cache")
        except InvalidRequestError as error:
            if error.code != "cache_in_use":
                raise
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        """See Transport."""
        info: dict[str, Any] = await self._client.get("/server_info")
        return info

    async def model_info(self) -> dict[str, Any]:
        """The model that is served."""
        info: dict[str, Any] = await self._client.get("/model_info")
        return info


class RuntimeEndpoint:
    """The server at `base_url`. Nothing is sent before a program runs.

    `chat_template_name` names a template of `sgray.lang.chat_template`; without it the server renders messages by the
    model's own.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        template = None if chat_template_name is None else get_chat_template(chat_template_name)
        self.loop = LoopThread()
        self.base_url = base_url
        self._transport = HttpTransport(HttpClient(base_url, self.loop, api_key=api_key, verify=verify is not False))
        self._native = NativeBackend(GatheringTransport(self._transport), self.loop, template)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template that replaces the model's own, if one does."""
        return self._native.chat_template

    @chat_template.setter
    def chat_template(self, template: ChatTemplate | None) -> None:
        self._native.chat_template = template

    @property
    def backend(self) -> NativeBackend:
        """The server as programs see it."""
        return self._native

    def get_model_name(self) -> str:
        """The model that the server has."""
        return str(self.loop.run(self._transport.model_info())["model_path"])

    def get_server_info(self) -> dict[str, Any]:
        """The server's facts."""
        return self.loop.run(self._native.server_info())

    def flush_cache(self) -> bool:
        """Empty the server's prefix cache; False while requests hold it."""
        return self.loop.run(self._native.flush())

    def close(self) -> None:
        """Close connections and thread; the next use opens them again."""
        self._native.close()
