"""Calls over HTTP on the loop of a backend: one session, errors as exceptions, server-sent events as JSON.

Knows nothing of what the calls mean.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from sgray.errors import InvalidRequestError, OverloadedError, SgrayError
from sgray.lang.backend import LoopThread
from sgray.lang.errors import EndpointError

MAX_CONNECTIONS = 256  # more wait on this side, where they cost nothing
CONNECT_S = 5.0


class HttpClient:
    """Posts JSON to one server. `verify` False accepts any certificate."""

    def __init__(self, base_url: str, loop: LoopThread, *, api_key: str | None = None, verify: bool = True) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"a URL begins with http:// or https://, not {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._loop = loop
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._verify = verify
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of the answer."""
        return await self._json("POST", path, body)

    async def get(self, path: str) -> Any:
        """The JSON of the answer."""
        return await self._json("GET", path, None)

    async def post_empty(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """A call whose answer holds nothing."""
        try:
            async with self._open().post(self.base_url + path, json=body) as response:
                await _check(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event. Closing the iterator closes the connection, which stops the call."""
        try:
            async with self._open().post(self.base_url + path, json=body) as response:
                await _check(response)
                async for event in _events(response):
                    if "error" in event:
                        raise _error(event["error"], 500)
                    yield event
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from None

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            async with self._open().request(method, self.base_url + path, json=body) as response:
                await _check(response)
                return await response.json(content_type=None)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from None
        except ValueError:
            raise EndpointError(f"{self.base_url}{path} answered with something that is not JSON") from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=self._verify),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
            self._loop.at_end(self._session.close)
        return self._session

    def _unreachable(self, error: BaseException) -> EndpointError:
        reason = str(error) or type(error).__name__
        return EndpointError(f"cannot reach {self.base_url}: {reason}")


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = await response.text(errors="replace")
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    raise _error(given.get("error", given) if isinstance(given, dict) else given, response.status)


def _error(given: Any, status: int) -> SgrayError:
    """The error that a server's answer stands for."""
    fields = given if isinstance(given, dict) else {}
    message = str(fields.get("message") or given)[:2000] or f"the server answered {status}"
    code = fields.get("code")
    kind: type[SgrayError] = EndpointError
    if status in (429, 503):
        kind = OverloadedError
    elif 400 <= status < 500:
        kind = InvalidRequestError
    error = kind(message, param=fields.get("param"), code=code if isinstance(code, str) else None)
    error.status = status
    return error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Events of any length: a line of the native form holds everything so far."""
    rest = b""
    async for block in response.content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)
    raise EndpointError("the connection ended in the middle of an answer")
