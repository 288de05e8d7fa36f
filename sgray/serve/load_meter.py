"""From the loads that an engine reports to what autoscaling asks: how busy the replica is, and how long a prompt waits.

Pure arithmetic; the clock is handed in. Knows nothing of Serve, nor of how many other replicas there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sgray.protocol import EngineInfo, Load
from sgray.serve.autoscale import MEMORY_SHARE, ONGOING, PREFILL_SHARE, SEAT_SHARE, WAIT_S
from sgray.serve.routing.speeds import SpeedPrior

RATE_S = 10.0  # the time over which prompt tokens that come are averaged


class LoadMeter:
    """Reads one engine. `mixed(n)` is the most prompt tokens in a step that also decodes, while `n` of them wait."""

    def __init__(
        self, info: EngineInfo, mixed: Callable[[int], int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._info = info
        self._mixed = mixed
        self._clock = clock
        self._read_at = clock()
        self._num_admitted = 0
        self._rate = 0.0  # prompt tokens a second that were not in the cache

    def read(self, load: Load, num_ongoing: int) -> dict[str, float]:
        """The signals now, by the names that autoscaling knows; to be called again and again, at any pace."""
        speed = self._prefill_speed(load)
        self._follow(load)
        pages = load.leased_pages + load.waiting_tokens / self._info.page_size
        return {
            ONGOING: float(num_ongoing),
            WAIT_S: load.waiting_tokens / speed,
            PREFILL_SHARE: min(1.0, self._rate / speed),
            MEMORY_SHARE: pages / max(1, load.total_pages),
            SEAT_SHARE: num_ongoing / self._info.max_running_requests,
        }

    def _prefill_speed(self, load: Load) -> float:
        """Prompt tokens a second beside the decoding that goes on: every step of a chunk is a decode step longer."""
        alone = load.prefill_tokens_per_s or SpeedPrior().prefill_tokens_per_s
        if not load.running:
            return alone
        return 1.0 / (1.0 / alone + load.decode_step_s / self._mixed(load.waiting_tokens))

    def _follow(self, load: Load) -> None:
        now, admitted = self._clock(), load.prompt_tokens - load.cached_tokens
        passed = now - self._read_at
        if passed <= 0:
            return
        weight = 1.0 - math.exp(-passed / RATE_S)
        self._rate += weight * ((admitted - self._num_admitted) / passed - self._rate)
        self._read_at, self._num_admitted = now, admitted
