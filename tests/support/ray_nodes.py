"""The service on a Ray cluster whose nodes, as many as a replica wants, are all this machine, until stdin ends.

A process of its own, because a process can be in one cluster alone. Its arguments: a port, and those of the application
as JSON. It says a line when the service is up.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from sgray.config import Config
from sgray.serve.build import APP_NAME, build

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


def begin(num_nodes: int) -> Cluster:
    """A cluster to which this process belongs.

    Ray gives up on a node after half a minute, which may not be enough on a busy machine: then another is begun.
    """
    cluster = Cluster()
    while cluster.head_node is None:
        add(cluster, include_dashboard=False)
    ray.init(cluster.address, configure_logging=False, log_to_driver=False)
    while sum(node["Alive"] for node in ray.nodes()) < num_nodes:
        add(cluster)
    return cluster


def add(cluster: Cluster, **options: Any) -> None:
    with contextlib.suppress(Exception):
        cluster.add_node(**NODE, **options)


def main(port: int, args: dict[str, Any]) -> None:
    cluster = begin(Config.parse(args).parallel.nnodes)
    try:
        serve.start("HeadOnly", {"host": "127.0.0.1", "port": port})
        serve.run(build(args), name=APP_NAME, route_prefix="/")
        print("up", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
