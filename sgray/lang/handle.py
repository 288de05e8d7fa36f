"""A Serve handle of the ingress as a backend: programs inside a Ray cluster, without HTTP.

The handle is passed in, so that nothing here knows Ray: it is an object whose methods have `remote`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sgray.errors import EngineError, SgrayError
from sgray.lang.backend import LoopThread
from sgray.lang.chat_template import get_chat_template
from sgray.lang.gathering import GatheringTransport
from sgray.lang.native import NativeBackend

MAX_CALLS = 256


class HandleTransport:
    """Carries calls to an ingress. At most `MAX_CALLS` run together; the others wait on this side."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._room: asyncio.Semaphore | None = None

    async def call(self, name: str, body: Mapping[str, Any]) -> Any:
        """See Transport."""
        async with self._slot():
            try:
                return await getattr(self._handle, name).remote(dict(body))
            except Exception as error:  # noqa: BLE001 - Serve wraps what the ingress raised
                raise _unwrapped(error) from None

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See Transport."""
        async with self._slot():
            chunks = self._handle.options(stream=True).generate.remote(dict(body))
            try:
                async for chunk in chunks:
                    yield chunk
            except GeneratorExit:
                chunks.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - as above
                raise _unwrapped(error) from None

    async def abort(self, name: str) -> None:
        """See Transport."""
        await self._ask("abort_calls", name)

    async def end_programs(self, programs: Sequence[str]) -> None:
        """See Transport."""
        await self._ask("end_programs", list(programs))

    async def flush(self) -> bool:
        """See Transport."""
        return bool(await self._ask("flush_cache"))

    async def server_info(self) -> dict[str, Any]:
        """See Transport."""
        info: dict[str, Any] = await self._ask("server_info")
        return info

    async def _ask(self, name: str, *given: Any) -> Any:
        try:
            return await getattr(self._handle, name).remote(*given)
        except Exception as error:  # noqa: BLE001 - as above
            raise _unwrapped(error) from None

    def _slot(self) -> asyncio.Semaphore:
        if self._room is None:
            self._room = asyncio.Semaphore(MAX_CALLS)
        return self._room


class ServeHandle:
    """The application behind `serve.get_app_handle(...)`."""

    def __init__(self, handle: Any, chat_template_name: str | None = None) -> None:
        template = None if chat_template_name is None else get_chat_template(chat_template_name)
        self.backend = NativeBackend(GatheringTransport(HandleTransport(handle)), LoopThread(), template)

    def flush_cache(self) -> bool:
        """Empty the prefix caches; False while requests hold one."""
        return self.backend.loop.run(self.backend.flush())

    def close(self) -> None:
        """End the thread that calls run on; the next use starts another one."""
        self.backend.close()


def _unwrapped(error: Exception) -> SgrayError:
    """The error of sgray's that a wrapper of Ray's holds."""
    cause: BaseException | None = getattr(error, "cause", None)
    for found in (error, cause):
        if isinstance(found, SgrayError):
            return found
    return EngineError(f"the call through the handle failed: {type(error).__name__}: {error}")
