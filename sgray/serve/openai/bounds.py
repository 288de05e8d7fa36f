"""What is checked of a call's head: how long its URL and how large its headers are. It knows no route and no body."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sgray.config import ApiConfig
from sgray.errors import HeadersTooLargeError, SgrayError, UrlTooLongError
from sgray.serve.openai.http import error_response

_HEADER_SIGNS = 4  # the colon, the space and the line's end


class Bounded:
    """Refuses calls with a longer URL (414) or larger headers (431) than the configuration allows."""

    def __init__(self, app: ASGIApp, api: ApiConfig) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope)(scope, receive, send)

    def _error(self, scope: Scope) -> SgrayError | None:
        most = self._api.max_url_bytes
        if len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"]) > most:
            return UrlTooLongError(f"Path and query are longer than this server's limit of {most} bytes.")
        most = self._api.max_header_bytes
        if sum(len(name) + len(value) + _HEADER_SIGNS for name, value in scope["headers"]) > most:
            return HeadersTooLargeError(f"The headers are larger than this server's limit of {most} bytes.")
        return None
