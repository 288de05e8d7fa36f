"""The HTTP application: routes, and what is the same for all of them. Plain ASGI; any server can run it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgray.config import Config
from sgray.errors import InvalidRequestError, MethodNotAllowedError, NotFoundError, OverloadedError, SgrayError
from sgray.serve.openai.answers import Answer
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.http import (
    STRAIGHT_SEND,
    ClientGoneError,
    EventStream,
    error_response,
    internal_error,
    json_response,
    read_json,
    while_connected,
)
from sgray.serve.openai.metrics import CONTENT_TYPE, ApiMetrics
from sgray.serve.openai.service import OpenAIService
from sgray.serve.openai.validate import shown
from sgray.text.token_ids import TextCodec

Handler = Callable[[Request], Awaitable[Response]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CLIENT_CLOSED = 499  # nginx's status for a client that left; nobody reads it, but logs and metrics do


def create_app(config: Config, tokenizer: TextCodec, backend: Backend) -> Starlette:
    """The application over a backend."""
    return app_of(OpenAIService(config, tokenizer, backend), config.api.max_body_bytes)


def app_of(service: OpenAIService, max_body_bytes: int) -> Starlette:
    """The application over a service that others may call as well."""
    calls = _Calls(service, max_body_bytes)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _guarded(calls.chat), methods=["POST"]),
            Route("/v1/completions", _guarded(calls.completions), methods=["POST"]),
            Route("/generate", _guarded(calls.generate), methods=["POST"]),
            Route("/v1/models", _guarded(calls.models), methods=["GET"]),
            Route("/v1/models/{name:path}", _guarded(calls.model), methods=["GET"]),
            Route("/health", _guarded(calls.ready), methods=["GET"]),
            Route("/ready", _guarded(calls.ready), methods=["GET"]),
            Route("/live", _guarded(calls.live), methods=["GET"]),
            Route("/metrics", _guarded(calls.metrics), methods=["GET"]),
        ],
        middleware=[Middleware(Observed, metrics=service.metrics)],
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False
    return app


class _Calls:
    """The handlers of the routes."""

    def __init__(self, service: OpenAIService, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_chat)

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_completions)

    async def generate(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_native)

    async def models(self, request: Request) -> Response:
        return json_response(self._service.models())

    async def model(self, request: Request) -> Response:
        return json_response(self._service.model(request.path_params["name"]))

    async def ready(self, request: Request) -> Response:
        """200 while a replica can take work."""
        if not self._service.backend.ready():
            raise OverloadedError("No replica can take work now.")
        return json_response({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """200 while this process answers at all."""
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _respond(self, request: Request, opened: Callable[[object], Awaitable[Answer]]) -> Response:
        """The answer of a call. What fails before the first event of a stream is still an HTTP status."""
        answer = await opened(await read_json(request, self._max_body_bytes))
        if not answer.is_stream:
            return json_response(await while_connected(request.receive, answer.whole()))
        events = answer.events()
        try:
            return EventStream(await while_connected(request.receive, events.__anext__()), events)
        except BaseException:  # also where the first event came at the very moment in which the caller was cancelled
            await events.aclose()
            raise


class Observed:
    """Gives each response its request id, the client's if it is sane, and counts it by route and status."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                route = scope.get("route")
                path = route.path if isinstance(route, Route) else "unknown"  # never the client's path: it is unbounded
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        scope[STRAIGHT_SEND] = send
        await self._app(scope, receive, observed)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex


def _guarded(handler: Handler) -> Handler:
    """The handler with every failure as an answer in OpenAI's error shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except SgrayError as error:
            return error_response(error)
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - the border: whatever it is, the client gets an answer
            return error_response(internal_error(error))

    return guarded


async def _http_exception(request: Request, exception: Exception) -> Response:
    """The router's own refusals: no such route, no such method."""
    assert isinstance(exception, HTTPException)
    error: SgrayError
    if exception.status_code == 404:
        error = NotFoundError(f"No such route: {request.method} {shown(request.url.path)}.")
    elif exception.status_code == 405:
        allowed = (exception.headers or {}).get("Allow", "")
        error = MethodNotAllowedError(f"{request.method} is not allowed here; allowed: {allowed}.")
    else:
        error = InvalidRequestError(str(exception.detail))
    return error_response(error, dict(exception.headers or {}))
