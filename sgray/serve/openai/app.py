"""The HTTP application: routes, and what is the same for all of them. Plain ASGI; any server can run it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgray.config import Config, environment_keys
from sgray.errors import InvalidRequestError, MethodNotAllowedError, NotFoundError, OverloadedError, SgrayError
from sgray.serve.anthropic import errors
from sgray.serve.batches.batches import Batches
from sgray.serve.batches.routes import BATCH_ROUTES, BatchCalls
from sgray.serve.openai.allowance import Limited, begin
from sgray.serve.openai.answers import Answer
from sgray.serve.openai.backend import Backend
from sgray.serve.openai.bounds import Bounded
from sgray.serve.openai.control import abort_name, ended_programs, flush_timeout
from sgray.serve.openai.http import (
    CLIENT_CLOSED,
    ERROR_SHAPE,
    REQUEST_ID,
    STRAIGHT_SEND,
    ClientGoneError,
    EventStream,
    Handler,
    error_response,
    internal_error,
    json_response,
    log_failure,
    read_json,
    while_connected,
)
from sgray.serve.openai.keys import OPEN_PATHS, Keyring, Keys, for_admin
from sgray.serve.openai.metrics import CONTENT_TYPE, ApiMetrics
from sgray.serve.openai.openapi import document
from sgray.serve.openai.operations import Entry
from sgray.serve.openai.overview import overview, page_file
from sgray.serve.openai.request_log import RequestLog
from sgray.serve.openai.service import OpenAIService
from sgray.serve.openai.sse import encode_json
from sgray.serve.openai.traced import Traced
from sgray.serve.openai.validate import shown
from sgray.serve.tracing import CallTraces
from sgray.text.token_ids import TextCodec

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def create_app(
    config: Config, tokenizer: TextCodec, backend: Backend, *, traces: CallTraces | None = None
) -> Starlette:
    """The application over a backend, closed by the keys of the configuration and of this process's environment."""
    keyring = Keyring(config.api, environment_keys())
    service = OpenAIService(config, tokenizer, backend)
    return app_of(service, config, keyring, batches=Batches.over(service, config), traces=traces)


def app_of(
    service: OpenAIService,
    config: Config,
    keyring: Keyring,
    *,
    batches: Batches | None,
    behind_keys: Sequence[Middleware] = (),
    traces: CallTraces | None = None,
) -> Starlette:
    """The application over a service that others may call as well. Routes of the operator go through `for_admin`.

    `behind_keys` are layers that see only calls which have passed the check of their key. With `traces`, calls of the
    model are traced.
    """
    api, calls, batch_calls = config.api, _Calls(service, config), BatchCalls(batches, config)
    routes = [_route(entry, calls) for entry in CALL_ROUTES] + [_route(entry, batch_calls) for entry in BATCH_ROUTES]
    log = None if api.request_log is None else RequestLog(api.request_log)
    paths = [entry.path for entry in CALL_ROUTES if entry.is_limited]
    traced = [] if traces is None else [Middleware(Traced, traces=traces, model_name=config.model_name, paths=paths)]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Observed, metrics=service.metrics, log=log),
            *traced,
            Middleware(Bounded),
            Middleware(Keys, keyring=keyring),
            Middleware(Limited, config=config, paths=paths),
            *behind_keys,
        ],
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False
    return app


class _Calls:
    """The handlers of the routes."""

    def __init__(self, service: OpenAIService, config: Config) -> None:
        self._service = service
        self._config = config
        self._api = config.api
        self._description: bytes | None = None

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_chat)

    async def responses(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_responses)

    async def messages(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_messages)

    async def count_tokens(self, request: Request) -> Response:
        return json_response(await self._service.count_tokens(await self._body(request)))

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_completions)

    async def generate(self, request: Request) -> Response:
        return await self._respond(request, self._service.open_native)

    async def tokenize(self, request: Request) -> Response:
        return json_response(await self._service.tokenize(await self._body(request)))

    async def detokenize(self, request: Request) -> Response:
        return json_response(await self._service.detokenize(await self._body(request)))

    async def score(self, request: Request) -> Response:
        scoring = await self._service.open_score(await self._body(request))
        begin(request.scope, scoring.generation)
        return json_response(await while_connected(request.receive, scoring.whole()))

    async def model_info(self, request: Request) -> Response:
        return json_response(self._service.control.model_info())

    async def server_info(self, request: Request) -> Response:
        return json_response(self._service.control.server_info())

    async def health_generate(self, request: Request) -> Response:
        """200 when a replica has drawn a token just now."""
        await while_connected(request.receive, self._service.control.check_generation())
        return json_response({"status": "ok"})

    async def abort_request(self, request: Request) -> Response:
        """200 also for names that nobody has. To stop everybody's calls is the operator's."""
        name = abort_name(await self._body(request))

        async def stop(request: Request) -> Response:
            self._service.backend.abort_calls(name)
            return Response()

        return await (for_admin(stop) if name is None else stop)(request)

    async def end_programs(self, request: Request) -> Response:
        """200 also for programs that nobody knows."""
        self._service.backend.end_programs(ended_programs(await self._body(request)))
        return Response()

    async def flush_cache(self, request: Request) -> Response:
        """200 when the caches of all replicas are empty."""
        flush = self._service.control.flush(flush_timeout(request.query_params.get("timeout")))
        await while_connected(request.receive, flush)
        return Response("Cache flushed.\n", media_type="text/plain")

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

    async def page(self, request: Request) -> Response:
        return page_file("index.html")

    async def page_style(self, request: Request) -> Response:
        return page_file("page.css")

    async def page_script(self, request: Request) -> Response:
        return page_file("page.js")

    async def overview(self, request: Request) -> Response:
        return json_response(overview(self._config, self._service.backend))

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The description of all routes; made once, when somebody first asks."""
        if self._description is None:
            self._description = encode_json(document(ROUTES))
        return Response(self._description, media_type="application/json")

    async def _respond(self, request: Request, opened: Callable[[object], Awaitable[Answer]]) -> Response:
        """The answer of a call. What fails before the first event of a stream is still an HTTP status."""
        answer = await opened(await self._body(request))
        begin(request.scope, answer.generation)
        if not answer.is_stream:
            return json_response(await while_connected(request.receive, answer.whole()))
        events = answer.events()
        try:
            first = await while_connected(request.receive, events.__anext__())
            return EventStream(first, events, answer.framing)
        except BaseException:  # also where the first event came at the very moment in which the caller was cancelled
            await events.aclose()
            raise

    async def _body(self, request: Request) -> object:
        return await read_json(request, self._api.max_body_bytes, self._api.max_json_depth)


CALL_ROUTES = (
    Entry("POST", "/v1/chat/completions", _Calls.chat, is_limited=True),
    Entry("POST", "/v1/completions", _Calls.completions, is_limited=True),
    Entry("POST", "/v1/responses", _Calls.responses, is_limited=True),
    Entry("POST", "/v1/messages", _Calls.messages, is_limited=True),
    Entry("POST", "/v1/messages/count_tokens", _Calls.count_tokens),
    Entry("POST", "/generate", _Calls.generate, is_limited=True),
    Entry("POST", "/v1/score", _Calls.score, is_limited=True),
    Entry("POST", "/v1/tokenize", _Calls.tokenize),
    Entry("POST", "/tokenize", _Calls.tokenize),
    Entry("POST", "/v1/detokenize", _Calls.detokenize),
    Entry("POST", "/detokenize", _Calls.detokenize),
    Entry("GET", "/v1/models", _Calls.models),
    Entry("GET", "/v1/models/{name:path}", _Calls.model),
    Entry("GET", "/health", _Calls.ready),
    Entry("GET", "/ready", _Calls.ready),
    Entry("GET", "/live", _Calls.live),
    Entry("GET", "/health_generate", _Calls.health_generate),
    Entry("GET", "/model_info", _Calls.model_info),
    Entry("GET", "/get_model_info", _Calls.model_info),
    Entry("GET", "/server_info", _Calls.server_info),
    Entry("GET", "/get_server_info", _Calls.server_info),
    Entry("GET", "/", _Calls.page),
    Entry("GET", "/page/page.css", _Calls.page_style),
    Entry("GET", "/page/page.js", _Calls.page_script),
    Entry("GET", "/overview", _Calls.overview),
    Entry("GET", "/metrics", _Calls.metrics),
    Entry("POST", "/abort_request", _Calls.abort_request),
    Entry("POST", "/end_programs", _Calls.end_programs),
    Entry("GET, POST", "/flush_cache", _Calls.flush_cache, is_admin=True),
    Entry("GET", "/openapi.json", _Calls.openapi),
)
"""Every route but those of batches, under its newer and its older names where SGLang has two."""

ROUTES = CALL_ROUTES + BATCH_ROUTES
"""Every route. Each handler is described in operations."""


def _route(entry: Entry, calls: _Calls | BatchCalls) -> Route:
    """The route of one entry, with its handler bound to `calls`."""
    handler: Handler = partial(entry.handler, calls)
    return Route(entry.path, _guarded(for_admin(handler) if entry.is_admin else handler), methods=entry.methods)


class Observed:
    """Gives each response its request id, the client's if it is sane, counts it by route and status, and logs it."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics, log: RequestLog | None) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        is_anthropic = errors.is_anthropic(scope["path"].removeprefix(scope.get("root_path", "")))
        began, status = time.monotonic(), CLIENT_CLOSED  # of those who get no answer at all

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic:
                    headers["request-id"] = request_id
                self._metrics.responses.labels(_route_of(scope), str(status)).inc()
            await send(message)

        scope[REQUEST_ID] = request_id
        if is_anthropic:
            scope[ERROR_SHAPE] = errors.error_answer
        scope[STRAIGHT_SEND] = send
        try:
            await self._app(scope, receive, observed)
        finally:
            if self._log is not None and (route := _route_of(scope)) not in OPEN_PATHS:
                self._log.write(scope, route, status, began)


def _route_of(scope: Scope) -> str:
    """The route's own path, never the client's: that is unbounded."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "unknown"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex


def _guarded(handler: Handler) -> Handler:
    """The handler with every failure as an answer in OpenAI's error shape."""

    async def guarded(request: Request) -> Response:
        request_id = request.scope[REQUEST_ID]
        try:
            return await handler(request)
        except SgrayError as error:
            log_failure(error, request_id)
            return error_response(error, request.scope)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - the border: whatever it is, the client gets an answer
            return error_response(internal_error(error, request_id), request.scope)

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
    return error_response(error, request.scope, dict(exception.headers or {}))
