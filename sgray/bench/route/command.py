"""The command `sgray bench route`: policies beside each other on a simulated cluster."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sgray.bench import report
from sgray.config import RoutingPolicy
from sgray.errors import ConfigError

if TYPE_CHECKING:
    from sgray.bench.route.arrivals import Arrival
    from sgray.bench.route.simulation import World

WORKLOADS = ("agentic", "bursts", "zero_reuse", "hot_prefix", "grouped")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="requests to play, in the format of the Mooncake traces")
    source.add_argument("--workload", choices=WORKLOADS, help="made-up requests")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="only the first so many requests of the trace")
    parser.add_argument("--jitter", type=float, default=0.0, help="spread the trace's arrivals over so many seconds")
    parser.add_argument("--seconds", type=float, default=300.0, help="of made-up arrivals (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=8, help="engine replicas (default: %(default)s)")
    parser.add_argument("--ingresses", type=int, default=1, help="routers, each for itself (default: %(default)s)")
    policies = ",".join(get_args(RoutingPolicy))
    parser.add_argument("--policies", default=policies, help="which, by commas (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="a message takes (default: %(default)s)")
    parser.add_argument("--loss", type=float, default=0.0, help="share of step reports lost (default: %(default)s)")
    parser.add_argument("--churn", type=float, metavar="S", help="every S seconds a replica dies; a new one follows")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="good: first token in s (default: %(default)s)")
    parser.add_argument("--slo-tpot", type=float, default=0.05, help="good: s a token after (default: %(default)s)")
    parser.add_argument("--memory-tokens", type=int, default=800_000, help="a replica's cache (default: %(default)s)")
    parser.add_argument(
        "--chunked-prefill-size", type=int, default=8192, help="as in the server (default: %(default)s)"
    )
    parser.add_argument("--mixed-prefill-size", type=int, default=192, help="as the server's (default: %(default)s)")
    parser.add_argument("--grain", type=int, default=16, help="tokens simulated as one: 1 to 64 (default: %(default)s)")
    parser.add_argument("--light", action="store_true", help="replicas of a few lines, for thousands of them")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")


def run(arguments: argparse.Namespace) -> int:
    """Simulates the policies one after the other, prints a table; 0."""
    policies = _policies(arguments.policies)
    _check(arguments)
    figures = {policy: measure(arguments, policy) for policy in policies}
    columns = ("goodput", "ttft_mean_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "hit_rate", "imbalance")
    rows = [(policy, *(one[name] for name in columns), one["decision_us_mean"]) for policy, one in figures.items()]
    header = ("policy", "goodput", "TTFT mean s", "p99", "TPOT p50 s", "p99", "hit rate", "imbalance", "decision us")
    print(report.table(header, rows))
    first = next(iter(figures.values()))
    print(
        f"goodput: share of {first['requests']} requests with TTFT <= {arguments.slo_ttft:g} s and "
        f"TPOT <= {arguments.slo_tpot:g} s; hit rate of one pooled LRU cache: {first['hit_rate_bound']:.3f}"
    )
    report.write_json(arguments.json, figures)
    return 0


def measure(arguments: argparse.Namespace, policy: RoutingPolicy) -> dict[str, Any]:
    """The figures of one policy."""
    from sgray.bench.route.arrivals import BLOCK, pooled_hit_rate
    from sgray.bench.route.figures import Objective, figures_of
    from sgray.bench.route.simulation import Simulation

    arrivals = arrivals_of(arguments)
    simulation = Simulation(_world(arguments, policy))
    begin = time.process_time()
    simulation.run(arrivals)
    seconds = time.process_time() - begin
    bound = pooled_hit_rate(arrivals, arguments.replicas * arguments.memory_tokens // BLOCK)
    objective = Objective(arguments.slo_ttft, arguments.slo_tpot)
    return {**figures_of(simulation, objective, bound), "cpu_s": seconds}


def arrivals_of(arguments: argparse.Namespace) -> Sequence[Arrival]:
    """The requests that the flags ask for."""
    from sgray.bench.route.arrivals import load_trace
    from sgray.bench.route.workloads import workloads

    if arguments.trace is not None:
        return load_trace(
            Path(arguments.trace),
            speed=arguments.speed,
            limit=arguments.limit,
            jitter_s=arguments.jitter,
            seed=arguments.seed,
        )
    make, rate = workloads()[arguments.workload]
    rate *= arguments.speed * arguments.replicas
    if not (arrivals := make(random.Random(arguments.seed), rate, arguments.seconds)):
        raise ConfigError(f"no request comes in {arguments.seconds:g} s; give --seconds more")
    return arrivals


def _world(arguments: argparse.Namespace, policy: RoutingPolicy) -> World:
    from sgray.bench.route.light import LightReplica
    from sgray.bench.route.replica import EngineReplica
    from sgray.bench.route.simulation import World
    from sgray.bench.route.timing import Size

    size = Size(
        memory_tokens=arguments.memory_tokens,
        step_tokens=arguments.chunked_prefill_size,
        mixed_tokens=arguments.mixed_prefill_size,
        grain=arguments.grain,
    )
    return World(
        policy=policy,
        num_replicas=arguments.replicas,
        num_ingresses=arguments.ingresses,
        delay_s=arguments.delay_ms / 1000,
        loss=arguments.loss,
        churn_s=arguments.churn,
        seed=arguments.seed,
        size=size,
        make_replica=LightReplica if arguments.light else EngineReplica,
    )


def _policies(text: str) -> list[RoutingPolicy]:
    known: dict[str, RoutingPolicy] = {name: name for name in get_args(RoutingPolicy)}
    names = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"unknown policy {wrong[0]!r}; known are: {', '.join(known)}")
    if not names:
        raise ConfigError("no policy is named; give --policies at least one")
    return [known[name] for name in names]


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("replicas", 1), ("ingresses", 1), ("memory_tokens", 512), ("mixed_prefill_size", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}")
    if arguments.grain not in (1, 2, 4, 8, 16, 32, 64):
        raise ConfigError("--grain must be a power of two from 1 to 64")
    if arguments.mixed_prefill_size * arguments.grain > arguments.chunked_prefill_size:
        raise ConfigError("--mixed-prefill-size times --grain must not exceed --chunked-prefill-size; lower --grain")
    for name in ("speed", "seconds", "slo_ttft", "slo_tpot"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if not 0 <= arguments.loss < 1:
        raise ConfigError("--loss must be at least 0 and below 1")
    if arguments.churn is not None and arguments.churn <= 0:
        raise ConfigError("--churn must be above 0")
