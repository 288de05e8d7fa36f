"""What HTTP adds to a call: bodies within a limit, the client's leaving, error answers, streams of events."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sgray.errors import InvalidRequestError, OverloadedError, RequestTooLargeError, SgrayError
from sgray.serve.openai.sse import Framing, encode_json
from sgray.serve.openai.validate import parse_json, shown

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Handler = Callable[[Request], Awaitable[Response]]

REQUEST_ID = "sgray.request_id"
"""Where a scope keeps the id of its call, the one that the answer's x-request-id has."""

STRAIGHT_SEND = "sgray.send"
"""Where a scope keeps the server's own `send`; the application's layers watch for nothing but a response's start."""

TRACE_HEADERS = "sgray.trace_headers"
"""Where a scope keeps the trace context of its call, if that is traced; see `Request.trace_headers`."""

CLIENT_CLOSED = 499
"""nginx's status for a client that left; nobody reads it, but logs, metrics and traces do."""

ERROR_SHAPE = "sgray.error_shape"
"""Where a scope keeps how its errors look, an `ErrorShape`, if not as OpenAI's."""

ErrorShape = Callable[[SgrayError, str], tuple[int, dict[str, Any]]]
"""The status and the body of an error, given the id of the call."""


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


def json_response(value: Any) -> Response:
    """A 200 with a JSON body."""
    return Response(encode_json(value), media_type="application/json")


def error_response(error: SgrayError, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    """The HTTP answer of an error, in the call's shape. ASCII, since messages may quote what the client sent."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    shape: ErrorShape | None = scope.get(ERROR_SHAPE)
    status, body = (error.status, error.body()) if shape is None else shape(error, scope[REQUEST_ID])
    return Response(json.dumps(body), status, headers, media_type="application/json")


def internal_error(error: BaseException, request_id: str) -> SgrayError:
    """What the client may know of a fault of the program; the log gets all of it."""
    logger.error("request %s: internal error", request_id, exc_info=error)
    message = f"The server made a mistake; its log has the details under the request id {request_id}."
    return SgrayError(message, code="internal_error")


def log_failure(error: SgrayError, request_id: str) -> None:
    """A line for the operator, where the server is to blame; not for refusals, of which there are many at once."""
    if error.status >= 500 and error.status != OverloadedError.status:
        logger.warning("request %s: %d %s: %s", request_id, error.status, error.code, error.message)


async def read_json(request: Request, max_bytes: int, max_depth: int) -> Any:
    """The body as a JSON value; raises a SgrayError where it is too large or deep, of another type, or no JSON."""
    _check_content_type(request.headers.get("content-type"))
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 19 or int(length) > max_bytes):
        raise _too_large(max_bytes)
    parts, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return parse_json(b"".join(parts), max_depth)


async def while_connected(receive: Receive, work: Awaitable[ResultT]) -> ResultT:
    """The result of `work`, which is cancelled, and has ended, when the client leaves or the caller is cancelled.

    Raises ClientGoneError when the client left. The body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():  # even with a result: nobody reads it, and some servers tell only once that the client left
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Sends `first` and then the events, each when the client has taken the last; a failure is the last event."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], framing: Framing) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [
            (b"content-type", b"text/event-stream"),
            *(header for header in self.raw_headers if header[0] not in (b"content-length", b"content-type")),
        ]
        self._first = first
        self._events = events
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop the call where the client leaves."""
        try:
            await while_connected(receive, self._send(send, scope[STRAIGHT_SEND], scope[REQUEST_ID]))
        except (ClientGoneError, OSError):  # a server may also report a closed connection from send
            logger.info("request %s: the client left a stream", scope[REQUEST_ID])
        finally:
            await self._events.aclose()

    async def _send(self, send: Send, straight: Send, request_id: str) -> None:
        """The start by `send`; what follows by `straight`, since every layer between is paid for each token."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await straight({"type": "http.response.body", "body": chunk, "more_body": True})
        except SgrayError as error:
            log_failure(error, request_id)
            body = self._framing.failure(error, request_id)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - the border: whatever it is, the stream must not look complete
            body = self._framing.failure(internal_error(error, request_id), request_id)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content_type(value: str | None) -> None:
    """JSON by its name, or no name at all."""
    if value is None:
        return
    media_type, _, parameters = value.partition(";")
    if not re.fullmatch(r"application/([\w.-]+\+)?json", media_type.strip().lower()):
        raise InvalidRequestError(f"Content-Type {shown(value)} is not accepted; send application/json.")
    charset = parameters.lower().partition("charset=")[2].strip(' "')
    if charset not in ("", "utf-8", "utf8"):
        raise InvalidRequestError(f"Charset {shown(charset)} is not accepted; JSON is UTF-8.")


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The body is larger than this server's limit of {max_bytes} bytes.")
