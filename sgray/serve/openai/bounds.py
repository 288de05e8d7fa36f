"""What is checked of a call's head: how long its URL and how large its headers are. It knows no route and no body."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sgray.errors import HeadersTooLargeError, SgrayError, UrlTooLongError
from sgray.serve.openai.http import error_response

MAX_URL_BYTES = 4096  # path and query
MAX_HEADER_BYTES = 16 * 2**10  # all headers together: as much as common proxies let through
_HEADER_SIGNS = 4  # the colon, the space and the line's end


class Bounded:
    """Refuses calls with a longer URL (414) or larger headers (431) than any that this API has a use for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        error = _error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope)(scope, receive, send)


def _error(scope: Scope) -> SgrayError | None:
    if len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"]) > MAX_URL_BYTES:
        return UrlTooLongError(f"Path and query are longer than this server's limit of {MAX_URL_BYTES} bytes.")
    if sum(len(name) + len(value) + _HEADER_SIGNS for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        return HeadersTooLargeError(f"The headers are larger than this server's limit of {MAX_HEADER_BYTES} bytes.")
    return None
