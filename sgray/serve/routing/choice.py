"""The policies by name."""

from __future__ import annotations

from sgray.config import RoutingPolicy
from sgray.serve.routing.affinity import LlmdSticky, RayPrefix, SGLangCacheAware
from sgray.serve.routing.cost import CostModel, LeastCost
from sgray.serve.routing.hashing import ConsistentHash
from sgray.serve.routing.policy import Policy
from sgray.serve.routing.turns import LeastLoad, RoundRobin


def make_policy(name: RoutingPolicy, model: CostModel | None = None) -> Policy:
    """A fresh policy; `model` is for `cost` alone."""
    if name == "cost":
        return LeastCost(model)
    others: dict[RoutingPolicy, type[Policy]] = {
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
        "consistent_hash": ConsistentHash,
        "sglang": SGLangCacheAware,
        "ray_prefix": RayPrefix,
        "llmd_sticky": LlmdSticky,
    }
    return others[name]()
