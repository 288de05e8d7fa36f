"""How many engine replicas there should be. Serve copies this module by value into its controller: no imports of ours.

Serve cannot see the requests that run over our links, so each replica reports how many it has (`ongoing`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ONGOING = "ongoing"


def replicas_for_ongoing_requests(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Enough replicas that each has `target_ongoing_requests`; Serve applies the configured delays on top.

    Where there is none, a handle call that waits for a replica asks for the first.
    """
    reported = (context.aggregated_metrics or {}).get(ONGOING, {})
    wanted = math.ceil(sum(reported.values()) / context.config.target_ongoing_requests)
    if context.total_queued_requests:
        wanted = max(wanted, 1)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}
