"""Traces of real calls: HTTP, dispatcher, links, replicas and engines are real, and so is what a collector is sent."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from grammars import make_model
from trace_collector import Collector, Seen, collecting

from sgray.config import Config
from sgray.errors import ConfigError
from sgray.serve.build import build
from sgray.serve.dispatch import Dispatcher
from sgray.serve.openai.app import create_app
from sgray.serve.replica import LLMReplica
from sgray.serve.spans import Spans
from sgray.serve.table import Endpoint
from sgray.serve.tracing import CallTraces, spans_of, traces_url
from sgray.text.tokenizer import Tokenizer

PATH = "/v1/completions"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
MODEL_ID = "tiny"
ENGINE_EVENTS = ["queued", "scheduled", "first_token", "finished"]


class Replica(LLMReplica):
    """Serve awaits the asynchronous `__del__`; Python's own call at the object's end has nobody to do so."""

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing; the tests await `LLMReplica.__del__`."""


class Service:
    """An ingress's parts and replicas, in one process, without Ray."""

    def __init__(self, values: dict[str, Any]) -> None:
        config = Config.parse(values)
        spans = spans_of(config, "ingress")
        assert spans is not None
        self.spans: Spans = spans
        self.values = values
        traces = CallTraces(spans)
        self.dispatcher = Dispatcher(watcher=traces)
        tokenizer = Tokenizer.load(Path(config.model.model_path))
        app = create_app(config, tokenizer, self.dispatcher, traces=traces)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        self.replicas: dict[str, LLMReplica] = {}

    async def add(self, name: str) -> None:
        replica = self.replicas[name] = Replica.__new__(Replica)
        await LLMReplica.__init__(replica, self.values)  # type: ignore[misc]
        endpoints = {}
        for known, one in self.replicas.items():
            endpoints[known] = Endpoint.from_metadata(one.record_replica_metadata())
        self.dispatcher.set_replicas(endpoints)  # type: ignore[arg-type]
        while name not in self.dispatcher.loads():
            await asyncio.sleep(0.01)

    async def post(self, headers: list[tuple[str, str]] | None = None, **changes: Any) -> httpx.Response:
        body = {"model": MODEL_ID, "prompt": "Hello world, " * 8, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return await self.http.post(PATH, json=body | changes, headers=headers or [])

    async def close(self) -> None:
        """As Serve ends them; what was not sent yet is sent now."""
        await self.http.aclose()
        await self.dispatcher.close()
        for replica in self.replicas.values():
            await LLMReplica.__del__(replica)
        self.spans.close()


@asynccontextmanager
async def serving(values: dict[str, Any], *names: str) -> AsyncIterator[Service]:
    service = Service(values)
    try:
        for name in names:
            await service.add(name)
        yield service
    finally:
        await service.close()


def run(values: dict[str, Any], names: str, test: Callable[[Service], Awaitable[None]]) -> None:
    """Runs a test on a service, and ends the service."""

    async def main() -> None:
        async with serving(values, *names) as service:
            await asyncio.wait_for(test(service), 120)

    asyncio.run(main())


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), model_dir)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def values_for(endpoint: str, model: Path) -> dict[str, Any]:
    return {
        "model": {"model_path": str(model), "served_model_name": MODEL_ID, "dtype": "float32", "num_threads": 1},
        "memory": {"max_total_tokens": 2048},
        "serve": {"otlp_traces_endpoint": endpoint, "graceful_shutdown_timeout_s": 4.0},
    }


@pytest.fixture
def values(collector: Collector, tiny_model: Path) -> dict[str, Any]:
    return values_for(collector.url, tiny_model)


def calls_of(collector: Collector) -> list[Seen]:
    return sorted(collector.named(f"POST {PATH}"), key=lambda span: span.begin_ns)


def engines_of(collector: Collector) -> list[Seen]:
    return sorted(collector.named("llm_request"), key=lambda span: span.begin_ns)


def test_a_call_is_one_trace_from_the_client_to_the_steps_of_the_engine(
    collector: Collector, values: dict[str, Any]
) -> None:
    async def test(service: Service) -> None:
        tracing = [("traceparent", TRACEPARENT), ("tracestate", "vendor=1"), ("x-request-id", "mine")]
        answer = await service.post(tracing)
        assert answer.status_code == 200
        assert "traceparent" not in answer.headers
        assert (await service.post(tracing, stream=True)).status_code == 200

    began_ns = time.time_ns()
    run(values, "a", test)
    calls, engines = calls_of(collector), engines_of(collector)
    assert len(collector.spans) == 4
    assert [(call.trace_id, call.parent_id) for call in calls] == [(TRACE_ID, SPAN_ID)] * 2
    assert [(one.trace_id, one.parent_id) for one in engines] == [(TRACE_ID, call.span_id) for call in calls]
    assert {one.trace_state for one in engines} == {"vendor=1"}
    assert [call.service["sgray.role"] for call in calls] == ["ingress"] * 2
    assert [one.service["sgray.role"] for one in engines] == ["replica"] * 2
    for call, engine in zip(calls, engines, strict=True):
        assert not call.is_error and not engine.is_error
        assert began_ns <= call.begin_ns <= engine.begin_ns + 10**7 and engine.end_ns <= time.time_ns()
    check_call(calls[0])
    check_engine(engines[0], num_cached=0)
    num_cached = engines[1].attributes["gen_ai.usage.cache_read.input_tokens"]
    assert num_cached == calls[1].attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    check_engine(engines[1], num_cached=num_cached)
    assert engines[1].events[0][2]["sgray.step"] == 0 < engines[1].events[1][2]["sgray.step"]


def check_call(call: Seen) -> None:
    found = dict(call.attributes)
    num_prompt = found["gen_ai.usage.input_tokens"]
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") <= found.pop("gen_ai.latency.e2e") < 100
    assert found.pop("gen_ai.response.id").startswith("cmpl-")
    assert found == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "sgray",
        "gen_ai.request.model": MODEL_ID,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "sgray.outcome": "finished",
        "sgray.request_id": "mine",
    }
    assert num_prompt > 16
    ((name, _, about),) = call.events
    assert (name, about["sgray.replica"], about["sgray.num_continued_tokens"]) == ("placed", "a", 0)
    assert about["gen_ai.request.id"].startswith("cmpl-")


def check_engine(engine: Seen, num_cached: int) -> None:
    found = engine.attributes
    assert found["gen_ai.request.model"] == MODEL_ID
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.response.finish_reasons"]) == (4, ["length"])
    assert found["gen_ai.usage.cache_read.input_tokens"] == num_cached
    assert (found["sgray.num_retractions"], found["sgray.num_continued_tokens"]) == (0, 0)
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if ".latency." in name}
    queue_s, prefill_s, decode_s = (latency[f"time_in_{name}"] for name in ("queue", "model_prefill", "model_decode"))
    assert min(queue_s, prefill_s, decode_s) >= 0
    assert latency["e2e"] == pytest.approx(queue_s + prefill_s + decode_s)
    assert latency["time_to_first_token"] == pytest.approx(queue_s + prefill_s)
    assert latency["time_in_model_inference"] == pytest.approx(prefill_s + decode_s)
    assert engine.end_ns - engine.begin_ns == pytest.approx(latency["e2e"] * 1e9, abs=1000)
    assert [name for name, _, _ in engine.events] == ENGINE_EVENTS
    times = [time_ns for _, time_ns, _ in engine.events]
    assert times == sorted(times) and (times[0], times[-1]) == (engine.begin_ns, engine.end_ns)
    about = {name: attributes for name, _, attributes in engine.events}
    num_prompt = found["gen_ai.usage.input_tokens"]
    assert about["scheduled"]["sgray.num_cached_tokens"] == num_cached
    assert [about[name]["sgray.num_tokens"] for name in ENGINE_EVENTS] == [num_prompt] * 3 + [num_prompt + 4]
    steps = [about[name]["sgray.step"] for name in ENGINE_EVENTS]
    assert steps[1] == steps[2] and steps[3] == steps[2] + 3, "one step of prompt, and one for each further token"


def test_choices_and_refusals_are_seen_and_other_routes_are_not(collector: Collector, values: dict[str, Any]) -> None:
    async def test(service: Service) -> None:
        assert (await service.post(n=2)).status_code == 200
        assert (await service.post(max_tokens=10_000)).status_code == 400
        assert (await service.http.get("/v1/models")).status_code == 200
        assert (await service.http.get(PATH)).status_code == 405
        assert (await service.http.get("/health_generate")).status_code == 200

    run(values, "a", test)
    good, bad = calls_of(collector)
    engines = engines_of(collector)
    assert len(collector.spans) == 4
    assert [one.parent_id for one in engines] == [good.span_id] * 2
    assert len({one.attributes["gen_ai.request.id"] for one in engines}) == 2
    assert good.attributes["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert good.parent_id == bad.parent_id == "" and good.trace_id != bad.trace_id
    assert bad.attributes["http.response.status_code"] == 400 and not bad.is_error, "the client is to blame"


MALFORMED = [
    [("traceparent", "nonsense")],
    [("traceparent", "")],
    [("traceparent", TRACEPARENT.upper())],
    [("traceparent", f"ff-{TRACE_ID}-{SPAN_ID}-01")],
    [("traceparent", f"00-{'0' * 32}-{SPAN_ID}-01")],
    [("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01")],
    [("traceparent", f"{TRACEPARENT}-more")],
    [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
    [("traceparent", "0" * 3000)],
]


def test_contexts_that_are_none_are_ignored_later_versions_are_read_and_unsampled_calls_not_sent(
    collector: Collector, values: dict[str, Any]
) -> None:
    async def test(service: Service) -> None:
        for headers in MALFORMED:
            assert (await service.post(headers)).status_code == 200, headers
        assert (await service.post([("traceparent", f"01-{TRACE_ID}-{SPAN_ID}-01-more")])).status_code == 200
        bad_state = [("traceparent", TRACEPARENT), ("tracestate", "\xff=,,")]
        assert (await service.post([(name, value.encode("latin-1")) for name, value in bad_state])).status_code == 200
        assert (await service.post([("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00")])).status_code == 200

    run(values, "a", test)
    calls, engines = calls_of(collector), engines_of(collector)
    num = len(MALFORMED)
    assert len(calls) == len(engines) == num + 2
    assert {call.parent_id for call in calls[:num]} == {""}
    assert TRACE_ID not in {call.trace_id for call in calls[:num]}
    assert len({call.trace_id for call in calls[:num]}) == num
    assert [(call.trace_id, call.parent_id) for call in calls[num:]] == [(TRACE_ID, SPAN_ID)] * 2
    assert [(one.trace_id, one.parent_id) for one in engines] == [(call.trace_id, call.span_id) for call in calls]


def test_an_answer_that_moves_shows_both_replicas(collector: Collector, values: dict[str, Any]) -> None:
    async def test(service: Service) -> None:
        task = asyncio.create_task(service.post(max_tokens=400))
        home = None
        while home is None:
            await asyncio.sleep(0.001)
            loads = service.dispatcher.loads()
            home = next((name for name, load in loads.items() if load.generation_tokens), None)
        await service.replicas[home]._server.close()
        answer = (await task).json()
        assert answer["usage"]["completion_tokens"] == 400
        homes.append(home)

    homes: list[str] = []
    run(values, "ab", test)
    (call,) = calls_of(collector)
    first, second = engines_of(collector)
    assert first.parent_id == second.parent_id == call.span_id and call.parent_id == ""
    names = [first.attributes["gen_ai.request.id"], second.attributes["gen_ai.request.id"]]
    assert names[1] == f"{names[0]}~1"
    assert first.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    num_sent = second.attributes["sgray.num_continued_tokens"]
    assert 0 < num_sent < 400
    assert second.attributes["gen_ai.usage.output_tokens"] == 400 - num_sent
    other = "b" if homes == ["a"] else "a"
    told = [(name, about["sgray.replica"], about["gen_ai.request.id"]) for name, _, about in call.events]
    assert told == [("placed", homes[0], names[0]), ("came_back", homes[0], names[0]), ("placed", other, names[1])]
    assert call.events[1][2]["error.type"] == "replica_lost"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_collector_that_is_gone_costs_calls_nothing_and_the_end_little(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        for _ in range(3):
            assert (await service.post([("traceparent", TRACEPARENT)])).status_code == 200

    run(values_for(closed_port(), tiny_model), "a", test)


def test_a_collector_that_never_answers_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        spans = Spans(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", MODEL_ID, {})
        began = time.monotonic()
        for number in range(5000):  # more than are kept
            spans.begin(f"{number}", []).end({}, None)
        assert time.monotonic() - began < 20
        began = time.monotonic()
        spans.close(timeout_s=0.2)
        assert time.monotonic() - began < 10


def test_the_last_spans_are_sent_before_the_end_and_the_environment_names_the_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    spans = Spans(traces_url(collector.url), MODEL_ID, {"service.name": "sgray", "sgray.role": "ingress"})
    spans.begin("call", [(b"traceparent", TRACEPARENT.encode())]).end({"a": 1}, "503")
    assert collector.spans == []
    spans.close()
    (span,) = collector.spans
    assert (span.parent_id, span.attributes, span.is_error) == (SPAN_ID, {"a": 1, "error.type": "503"}, True)
    assert (span.service["service.name"], span.service["sgray.role"]) == ("mine", "ingress")


def test_the_url_gets_the_path_of_collectors_where_it_has_none() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://c:4317", "http://", "http://c:port", "http://c d", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.otlp_traces_endpoint: .*http://localhost:4318/v1/traces"):
        Config.parse({"serve": {"otlp_traces_endpoint": url}})


def test_a_secret_in_the_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS"):
        Config.parse({"serve": {"otlp_traces_endpoint": "https://me:secret@c:4318"}})


def test_without_the_packages_the_start_is_refused_with_the_extras_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sgray.serve.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint.*sgray\[otel\]"):
        build({"serve": {"otlp_traces_endpoint": "http://localhost:4318"}})
    assert build({}), "nothing of it is needed where no collector is named"


def test_nothing_of_it_is_imported_where_no_collector_is_named() -> None:
    program = (
        "import json, sys\n"
        "import ray.serve.schema\n"
        "before = set(sys.modules)\n"
        "from sgray.serve.build import build\n"
        "from sgray.serve.tracing import spans_of\n"
        "from sgray.config import Config\n"
        "build({})\n"
        "assert spans_of(Config(), 'ingress') is None\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "sgray.serve.tracing" in loaded
    assert [name for name in loaded if "opentelemetry" in name or name == "sgray.serve.spans"] == []
