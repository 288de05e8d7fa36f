"""What a replica reserves of Ray's cluster: one bundle of resources, or one on each of several nodes.

Bundle 0 is that of the replica's own actor.
"""

from __future__ import annotations

from typing import Any

import ray

from sgray.config import Config
from sgray.errors import ConfigError


def check_nodes(config: Config) -> None:
    """Raises ConfigError where ranks on several nodes can be seen to find no place."""
    num_nodes = config.parallel.nnodes
    if num_nodes == 1:
        return
    if config.num_reserved_cpus <= 0 and gpus_per_node(config) == 0:
        raise ConfigError("serve.num_cpus_per_replica must be above 0 where parallel.nnodes is above 1")
    working = [node for node in alive_nodes() if node["Resources"].get("CPU", 0) > 0]
    # A head that does no work says nothing of what an autoscaler will add; one machine alone stays alone.
    if len(alive_nodes()) == len(working) == 1:
        raise ConfigError(
            f"parallel.nnodes {num_nodes}: Ray's cluster has one node; start Ray on more (`ray start --address`, "
            "docs/deploying.md), or set nnodes to 1"
        )


def actor_options(config: Config) -> dict[str, Any]:
    """What Ray is to reserve for an actor and the ranks of its node."""
    return {"num_cpus": config.num_reserved_cpus, "num_gpus": gpus_per_node(config)}


def group_options(config: Config) -> dict[str, Any]:
    """The placement group of a deployment's replicas; none where one node is enough."""
    if config.parallel.nnodes == 1:
        return {}
    asked = {"CPU": config.num_reserved_cpus, "GPU": float(gpus_per_node(config))}
    bundle = {name: number for name, number in asked.items() if number}
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(config.parallel.nnodes)],
        "placement_group_strategy": "STRICT_SPREAD",
    }


def gpus_per_node(config: Config) -> int:
    """GPUs that a replica reserves on each of its nodes; if it reserves none it sees none, and `auto` is the CPU."""
    parallel, device = config.parallel, config.model.device
    if device == "auto":
        counts = sorted((node["Resources"].get("GPU", 0) for node in alive_nodes()), reverse=True)
        fewest = counts[parallel.nnodes - 1] if len(counts) >= parallel.nnodes else 0
        device = "cuda" if fewest >= parallel.ranks_per_node else "cpu"
    return parallel.ranks_per_node if device == "cuda" else 0


def alive_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster; none where this process is in no cluster."""
    return [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
