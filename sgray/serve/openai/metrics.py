"""Prometheus metrics: what calls asked and got, and how full each replica is. Names follow SGLang's, prefix `sgray:`.

Everything sits in a registry of its own, so that two apps in one process do not share counts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sgray.protocol import Load, Usage
from sgray.serve.openai.backend import Backend

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_CALL_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

Figure = tuple[str, str, Callable[[Load], float]]


class ApiMetrics:
    """The counts of one app, and the text of /metrics."""

    def __init__(self, model_name: str, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of calls.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self.calls = self._counter("num_requests", "Calls that passed the checks.")
        self.aborted = self._counter("num_aborted_requests", "Calls whose client went away.")
        self.failed = self._counter("num_failed_requests", "Calls that ended with an error after the checks.")
        active = Gauge("sgray:num_active_requests", "Calls in progress.", ["model_name"], registry=self._registry)
        self.active = active.labels(model_name)
        self.first_token_s = self._histogram("time_to_first_token_seconds", "From call to first token.", _FIRST_TOKEN_S)
        self.tokens = TokenTally(model_name)
        self._registry.register(self.tokens)
        self.call_s = self._histogram("e2e_request_latency_seconds", "From call to last token.", _CALL_S)
        labels = ["route", "status"]
        self.responses = Counter("sgray:http_responses", "HTTP responses.", labels, registry=self._registry)
        self._registry.register(LoadCollector(backend))

    def call(self) -> CallMeter:
        """The meter of a call that starts now."""
        return CallMeter(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"sgray:{name}", text, ["model_name"], registry=self._registry)
        return family.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"sgray:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model_name)


class TokenTally(Collector):
    """What is counted with every token, in plain numbers: the library's counters take eight times as long.

    `add` belongs to one thread; a reader in another sees figures that are at most a token apart.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._num_tokens = 0
        self._sum_s = 0.0
        self._counts = [0] * (len(_NEXT_TOKEN_S) + 1)

    def add(self, num_tokens: int, seconds: float | None) -> None:
        """New tokens of a choice, each `seconds` after the one before it; None for the first."""
        self._num_tokens += num_tokens
        if seconds is not None:
            self._sum_s += seconds
            self._counts[bisect_left(_NEXT_TOKEN_S, seconds)] += 1

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return self._families()

    def collect(self) -> Iterable[Metric]:
        """The figures as of now."""
        counter, histogram = self._families()
        counter.add_metric([self._model_name], self._num_tokens)
        names = [*map(floatToGoString, _NEXT_TOKEN_S), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        histogram.add_metric([self._model_name], buckets, self._sum_s)
        return [counter, histogram]

    def _families(self) -> tuple[CounterMetricFamily, HistogramMetricFamily]:
        labels = ["model_name"]
        return (
            CounterMetricFamily("sgray:generation_tokens", "Tokens generated for calls.", labels=labels),
            HistogramMetricFamily("sgray:inter_token_latency_seconds", "Between tokens of a choice.", labels=labels),
        )


class CallMeter:
    """Times one call from its construction. Exactly one of `finished`, `aborted` and `failed` ends it."""

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._last: dict[int, float] = {}
        metrics.calls.inc()
        metrics.active.inc()

    def received(self, choice: int, num_tokens: int) -> None:
        """New tokens of a choice arrived."""
        if not num_tokens:
            return
        now = time.monotonic()
        last = self._last.get(choice)
        if not self._last:
            self._metrics.first_token_s.observe(now - self._start)
        self._metrics.tokens.add(num_tokens, None if last is None else (now - last) / num_tokens)
        self._last[choice] = now

    def finished(self, usage: Usage) -> None:
        """The call got its whole answer."""
        self._metrics.call_s.observe(time.monotonic() - self._start)
        self._end(usage)

    def aborted(self, usage: Usage) -> None:
        """The client left before the end."""
        self._metrics.aborted.inc()
        self._end(usage)

    def failed(self, usage: Usage) -> None:
        """The call ended with an error."""
        self._metrics.failed.inc()
        self._end(usage)

    def _end(self, usage: Usage) -> None:
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)
        self._metrics.active.dec()


class LoadCollector(Collector):
    """The loads of the replicas as gauges and counters, read when /metrics is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: replicas come and go."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The metrics of the replicas that are known now."""
        loads = self._backend.loads()
        return engine_metrics(loads, self._backend.info.page_size) if loads else []


def engine_metrics(loads: Mapping[str, Load], page_size: int) -> list[Metric]:
    """One metric family a figure, one sample a replica. Pages are shown as tokens."""
    families: list[Metric] = []
    for name, text, value in _gauges(page_size):
        gauge = GaugeMetricFamily(f"sgray:{name}", text, labels=["replica"])
        for replica, load in loads.items():
            gauge.add_metric([replica], value(load))
        families.append(gauge)
    for name, text, value in _counters():
        counter = CounterMetricFamily(f"sgray:engine_{name}", text, labels=["replica"])
        for replica, load in loads.items():
            counter.add_metric([replica], value(load))
        families.append(counter)
    return families


def _gauges(page_size: int) -> list[Figure]:
    return [
        ("num_running_reqs", "Sequences computed together.", lambda load: load.running),
        ("num_queue_reqs", "Sequences that wait.", lambda load: load.waiting),
        ("num_queue_tokens", "Prompt tokens not computed yet.", lambda load: load.waiting_tokens),
        ("num_used_tokens", "Tokens in memory that running sequences hold.", lambda load: load.resident_tokens),
        ("max_total_num_tokens", "Size of the key-value memory.", lambda load: load.total_pages * page_size),
        ("kv_available_tokens", "Free key-value memory.", lambda load: load.free_pages * page_size),
        ("kv_evictable_tokens", "Cached and not in use.", lambda load: load.cached_pages * page_size),
        ("kv_used_tokens", "In use.", lambda load: load.leased_pages * page_size),
        ("token_usage", "Share of memory in use.", lambda load: _share(load.leased_pages, load.total_pages)),
        ("cache_hit_rate", "Cached share of prompts.", lambda load: _share(load.cached_tokens, load.prompt_tokens)),
        ("last_step_seconds", "Duration of the last step.", lambda load: load.last_step_s),
    ]


def _counters() -> list[Figure]:
    return [
        ("steps", "Steps of the engine.", lambda load: load.steps),
        ("requests", "Sequences that the engine took.", lambda load: load.requests),
        ("prompt_tokens", "Prompt tokens of sequences.", lambda load: load.prompt_tokens),
        ("cached_tokens", "Prompt tokens not computed.", lambda load: load.cached_tokens),
        ("generation_tokens", "Tokens drawn.", lambda load: load.generation_tokens),
        ("aborted_requests", "Sequences aborted.", lambda load: load.aborted),
        ("retracted_requests", "Sequences that gave memory back to begin again.", lambda load: load.retracted),
        ("refused_requests", "Sequences refused.", lambda load: load.refused),
    ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
