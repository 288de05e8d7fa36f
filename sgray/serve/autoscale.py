"""How many engine replicas there should be. Pure; Serve copies this module by value into its controller, where none of
ours need be installed: it imports nothing of ours, and nothing of Ray.

Serve cannot see the requests that run over our links, so each replica reports signals about itself, which
`sgray.serve.load_meter` makes. Two policies read them: `EngineSignals` asks how busy the engines are and how long a
prompt waits, `replicas_for_ongoing_requests` counts requests and nothing else. Serve lays the configured delays over
either: a number has to be wanted for so long before it is followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ONGOING = "ongoing"  # requests that run or wait
WAIT_S = "wait_s"  # until the first prompt token of a request that comes now is computed
PREFILL_SHARE = "prefill_share"  # of the prompt tokens that it can compute, those that come
MEMORY_SHARE = "memory_share"  # of the key-value pages, those that running and waiting requests need
SEAT_SHARE = "seat_share"  # of the sequences that can run together, those that run or wait

FULL = 0.8  # a share above this leaves no room for a burst
MOST = 1.5  # that one replica counts for, however long its queue: what waits there will not move to another
CALM = 0.7  # of full; a replica goes only where the others stay below, so that it is not missed at once


class EngineSignals:
    """As many replicas as the work would keep busy, up at once and down in steps.

    Time to first token is held below `target_ttft_s` as far as waiting makes it; `target_ongoing_requests`, where
    given, are the requests that a replica should hold at most.

    Up: by half of the replicas that run at most, at least by one: a backlog goes on growing while new ones load their
    model, which says nothing about how many there have to be. Down: only when the work fits into fewer with
    room to spare, when every replica has reported and all that are wanted run; to no less than half at a time.
    """

    def __init__(self, target_ttft_s: float, target_ongoing_requests: float | None = None) -> None:
        self._target_ttft_s = target_ttft_s
        self._target_ongoing_requests = target_ongoing_requests

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Called by Serve again and again: the number of replicas, and no state."""
        signals = context.aggregated_metrics or {}
        reported = signals.get(ONGOING, {})
        # A call that waits for a replica to be there is seen by Serve alone.
        least = 1 if context.total_queued_requests or any(reported.values()) else 0
        running, wanted = context.current_num_replicas, context.target_num_replicas
        is_known = running >= wanted and len(reported) >= running
        work = self.work(signals) if least else 0.0  # averages fade, and are never quite nothing
        number = replicas_for_work(work, least, running=running, wanted=wanted, may_shrink=is_known)
        return _bounded(number, context), {}

    def work(self, signals: Mapping[str, Mapping[Any, float]]) -> float:
        """The work in replicas that it keeps as busy as they should be. `signals` are by name, then by replica."""
        full = {WAIT_S: self._target_ttft_s, PREFILL_SHARE: FULL, MEMORY_SHARE: FULL, SEAT_SHARE: FULL}
        if self._target_ongoing_requests is not None:
            full[ONGOING] = self._target_ongoing_requests
        return max(
            sum(min(MOST, value / most) for value in signals.get(name, {}).values()) for name, most in full.items()
        )


def replicas_for_work(work: float, least: int, *, running: int, wanted: int, may_shrink: bool) -> int:
    """The step from the `wanted` replicas, some of which may still start, to those that this work needs.

    Nothing changes as long as the work fits, and would leave one replica less with too much.
    """
    if max(work, least) > wanted:
        return max(wanted, min(math.ceil(max(work, least)), max(1, math.ceil(MOST * running))))
    enough = max(least, math.ceil(work / CALM))
    if may_shrink and enough < wanted:
        return max(enough, wanted // 2)
    return wanted


def replicas_for_ongoing_requests(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Enough replicas that each has `target_ongoing_requests`.

    Where there is none, a handle call that waits for a replica asks for the first.
    """
    reported: Iterable[float] = (context.aggregated_metrics or {}).get(ONGOING, {}).values()
    wanted = math.ceil(sum(reported) / context.config.target_ongoing_requests)
    if context.total_queued_requests:
        wanted = max(wanted, 1)
    return _bounded(wanted, context), {}


def _bounded(wanted: int, context: AutoscalingContext) -> int:
    return max(context.capacity_adjusted_min_replicas, min(context.capacity_adjusted_max_replicas, wanted))
