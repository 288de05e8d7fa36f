"""Made-up workloads, each with one property that routing stands or falls with. A seed fixes everything.

`rate` is requests a second over all replicas (sessions for `agentic`, bursts of ten for `bursts`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

from sgray.bench.route.arrivals import BLOCK, Arrival

Maker = Callable[[random.Random, float, float], list[Arrival]]


def workloads() -> Mapping[str, tuple[Maker, float]]:
    """Name -> how it is made, and its rate a replica at speed 1."""
    return {
        "agentic": (agentic, 2.5),
        "bursts": (bursts, 0.8),
        "zero_reuse": (zero_reuse, 2.2),
        "hot_prefix": (hot_prefix, 10.0),
        "grouped": (grouped, 7.5),
    }


def _times(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    time = rng.expovariate(rate)
    while time < seconds:
        yield time
        time += rng.expovariate(rate)


def _tokens(rng: random.Random, blocks: tuple[int, ...]) -> int:
    return len(blocks) * BLOCK - rng.randrange(BLOCK)


def _output(rng: random.Random, mean: float, most: int = 1500) -> int:
    return min(most, 20 + int(rng.expovariate(1 / mean)))


def agentic(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """Sessions of 4 to 25 turns over twelve applications of unequal popularity, each with a prompt of 4k to 12k."""
    fresh = itertools.count()
    heads = [tuple(itertools.islice(fresh, rng.randrange(8, 25))) for _ in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(heads))]
    arrivals = []
    for time in _times(rng, rate, seconds):
        blocks = rng.choices(heads, weights)[0]
        first = last = None
        for _ in range(min(25, 4 + int(rng.expovariate(1 / 6)))):
            blocks += tuple(itertools.islice(fresh, 1 + int(rng.expovariate(1 / 1.5))))
            turn = Arrival(time, _tokens(rng, blocks), _output(rng, 180), blocks, gap_s=0.5 + rng.expovariate(1 / 4))
            if last is None:
                first = turn
            else:
                last.then = turn
            last = turn
        assert first is not None
        arrivals.append(first)
    return arrivals


def bursts(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """Ten siblings at one instant with 6k tokens in common and 1k of their own, nothing of it seen before."""
    fresh = itertools.count()
    arrivals = []
    for time in _times(rng, rate, seconds):
        shared = tuple(itertools.islice(fresh, 12))
        for _ in range(10):
            blocks = shared + tuple(itertools.islice(fresh, 2))
            arrivals.append(Arrival(time, _tokens(rng, blocks), _output(rng, 200), blocks))
    return arrivals


def zero_reuse(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """Prompts of 500 to 16k tokens that share nothing."""
    fresh = itertools.count()
    arrivals = []
    for time in _times(rng, rate, seconds):
        blocks = tuple(itertools.islice(fresh, 1 + min(31, int(rng.expovariate(1 / 12)))))
        arrivals.append(Arrival(time, _tokens(rng, blocks), _output(rng, 200), blocks))
    return arrivals


def hot_prefix(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """One prompt of 8k tokens in common to all, and up to 2k of their own."""
    fresh = itertools.count()
    shared = tuple(itertools.islice(fresh, 16))
    arrivals = []
    for time in _times(rng, rate, seconds):
        blocks = shared + tuple(itertools.islice(fresh, rng.randrange(1, 5)))
        arrivals.append(Arrival(time, _tokens(rng, blocks), _output(rng, 200), blocks))
    return arrivals


def grouped(rng: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """150 groups with a prefix of 6k tokens each and five questions of 1k; all groups alike in popularity."""
    fresh = itertools.count()
    prefixes = [tuple(itertools.islice(fresh, 12)) for _ in range(150)]
    questions = [[tuple(itertools.islice(fresh, 2)) for _ in range(5)] for _ in prefixes]
    arrivals = []
    for time in _times(rng, rate, seconds):
        group = rng.randrange(len(prefixes))
        blocks = prefixes[group] + rng.choice(questions[group])
        arrivals.append(Arrival(time, len(blocks) * BLOCK, 300, blocks))
    return arrivals
