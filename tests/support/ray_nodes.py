"""The service on a Ray cluster whose nodes, as many as a replica wants, are all this machine, until stdin ends.

A process of its own, because a process can be in one cluster alone. Its arguments: a port, and those of the application
as JSON. It says a line when the service is up.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster
from waiting import until

from sgray.config import Config
from sgray.serve.build import APP_NAME, build

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


def main(port: int, args: dict[str, object]) -> None:
    num_nodes = Config.parse(args).parallel.nnodes
    cluster = Cluster()
    for number in range(num_nodes):  # Ray's own wait for them gives up too soon for a busy machine
        cluster.add_node(wait=False, **NODE, **({"include_dashboard": False} if number == 0 else {}))
    ray.init(cluster.address, configure_logging=False, log_to_driver=False)
    try:
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == num_nodes, "not all nodes came", 120.0)
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
