"""Time of a call on the device, without what it costs the host to launch it: graphs of many calls are replayed.

Knows nothing of what is called.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

GRAPH_US = 8000.0  # long beside the few microseconds that starting a graph takes
MOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """`rounds` replays are timed, the median counts."""

    device: torch.device
    rounds: int = 20

    def microseconds(self, calls: Sequence[Call]) -> float:
        """Time of one of `calls`, which are made in turn; together they should touch more memory than the L2 holds.

        On a CPU, where nothing can be captured, the host's clock: good for trying out, not for figures.
        """
        if self.device.type != "cuda":
            return _host_us(calls)
        estimate = self._eager_us(calls)
        repeated = list(calls) * num_passes(len(calls), estimate)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in repeated:
                call()
        graph.replay()
        times = [self._elapsed_us(graph.replay) for _ in range(self.rounds)]
        return statistics.median(times) / len(repeated)

    def _eager_us(self, calls: Sequence[Call]) -> float:
        """A first guess; the first pass also compiles what has to be compiled."""
        for call in calls:
            call()
        return self._elapsed_us(lambda: [call() for call in calls]) / len(calls)

    def _elapsed_us(self, work: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def num_passes(num_calls: int, call_us: float) -> int:
    """How often a graph makes all its calls: for GRAPH_US or MOST_CALLS, whichever is less, at least once."""
    wanted = min(MOST_CALLS, GRAPH_US / call_us)
    return max(1, round(wanted / num_calls))


def _host_us(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls) * 1e6
