"""A collector of traces on a port of its own: takes OTLP over HTTP as real ones do, and keeps what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    is_error: bool
    trace_state: str
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    service: dict[str, Any]


class Collector:
    """What came, on every path but for its own an answer of 404."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Seen] = []

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = values(resource.resource.attributes)
            self.spans += [seen(span, service) for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


def seen(span: Any, service: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        span.trace_state,
        values(span.attributes),
        [(event.name, event.time_unix_nano, values(event.attributes)) for event in span.events],
        service,
    )


def values(attributes: Iterable[Any]) -> dict[str, Any]:
    """Attributes of the protocol as Python's values."""
    return {one.key: value(one.value) for one in attributes}


def value(given: Any) -> Any:
    kind = given.WhichOneof("value")
    return [value(one) for one in given.array_value.values] if kind == "array_value" else getattr(given, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf":
                collector.take(body)
                self.send_response(200)
            else:
                self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
