"""Spans of OpenTelemetry made of plain data, and sent to a collector by OTLP over HTTP, in batches, on a thread.

The one file that knows OpenTelemetry; nothing imports it but `tracing`, and that only where traces are wanted. Where
the collector is gone or slow, spans are dropped and calls are not held up. What the SDK reads from the environment
(OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...) counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sgray.protocol import Mark, Trail

CLOSE_S = 5.0
"""How long a process that ends waits for its last spans to be taken."""

ENGINE_SPAN = "llm_request"

Value = str | int | float | bool | Sequence[str]
Headers = Iterable[tuple[bytes, bytes]]


class CallSpan:
    """The span of a call that goes on. `trace_headers` make other spans its children; empty where it is not kept."""

    def __init__(self, span: Span, propagator: TraceContextTextMapPropagator) -> None:
        self._span = span
        self.trace_headers: dict[str, str] = {}
        if span.is_recording():
            propagator.inject(self.trace_headers, set_span_in_context(span))

    def event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Something happened now."""
        self._span.add_event(name, dict(attributes))

    def end(self, attributes: Mapping[str, Value], error: str | None) -> None:
        """It is over; `error` is the kind of the failure that the server is to blame for, if any."""
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Spans:
    """Where one process leaves its spans. `service` are attributes of the process, for which the environment counts
    more. All methods may be called from any thread, and none but `close` waits for anything."""

    def __init__(self, endpoint: str, model_name: str, service: Mapping[str, str]) -> None:
        resource = Resource.create(dict(service)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("sgray")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def begin(self, name: str, headers: Headers) -> CallSpan:
        """The span of a call with these HTTP headers; the child of what their trace context names, if they have one."""
        parent = self._propagator.extract(headers, Context(), _HeaderGetter())
        span = self._tracer.start_span(name, parent, SpanKind.SERVER)
        return CallSpan(span, self._propagator)

    def record(self, trails: Sequence[Trail]) -> None:
        """A span for each way through an engine of this process. To be called soon: the clock is read once."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        for trail in trails:
            self._record(trail, offset_ns)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, as far as that is possible in this time; blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="sgray-last-spans", daemon=True)
        closing.start()
        closing.join(timeout_s)

    def _record(self, trail: Trail, offset_ns: int) -> None:
        def moment(mark: Mark) -> int:
            return offset_ns + int(mark.at_s * 1e9)

        first, last = trail.marks[0], trail.marks[-1]
        span = self._tracer.start_span(
            ENGINE_SPAN,
            self._propagator.extract(trail.request.trace_headers, Context()),
            SpanKind.SERVER,
            attributes={"gen_ai.request.model": self._model_name, **_of_trail(trail)},
            start_time=moment(first),
        )
        if span.is_recording():
            for mark in trail.marks:
                span.add_event(mark.name, _of_mark(mark), moment(mark))
            if (error := trail.finish.error) is not None:
                span.set_attribute("error.type", error.code or error.type)
                span.set_status(StatusCode.ERROR, error.message)
        span.end(moment(last))


class _HeaderGetter(Getter[Headers]):
    """Reads the headers of an ASGI scope. What may come once and comes twice is as good as malformed."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        found = [value.decode("latin-1") for name, value in carrier if name == key.encode()]
        return None if not found or (key == "traceparent" and len(found) > 1) else found

    def keys(self, carrier: Headers) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


def _of_trail(trail: Trail) -> dict[str, Value]:
    """What was asked, what came of it, and what took how long (seconds). Latencies have vLLM's names."""
    request, last = trail.request, trail.marks[-1]
    when = {mark.name: mark for mark in reversed(trail.marks)}  # the first of each name
    sampling = request.sampling
    found: dict[str, Value] = {
        "gen_ai.request.id": request.id,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.input_tokens": request.num_prompt,
        "gen_ai.usage.output_tokens": last.num_tokens - len(request.tokens),
        "gen_ai.response.finish_reasons": [trail.finish.reason],
        "sgray.num_continued_tokens": request.num_generated,
        "sgray.num_retractions": sum(mark.name == "retracted" for mark in trail.marks),
    }
    if "scheduled" in when:
        found["gen_ai.usage.cache_read.input_tokens"] = min(when["scheduled"].num_cached, request.num_prompt)
    for name, begin, end in (
        ("time_in_queue", "queued", "scheduled"),
        ("time_to_first_token", "queued", "first_token"),
        ("time_in_model_prefill", "scheduled", "first_token"),
        ("time_in_model_decode", "first_token", "finished"),
        ("time_in_model_inference", "scheduled", "finished"),
        ("e2e", "queued", "finished"),
    ):
        if begin in when and end in when:
            found[f"gen_ai.latency.{name}"] = when[end].at_s - when[begin].at_s
    return found


def _of_mark(mark: Mark) -> dict[str, Value]:
    return {"sgray.step": mark.step, "sgray.num_tokens": mark.num_tokens, "sgray.num_cached_tokens": mark.num_cached}
