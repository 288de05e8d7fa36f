"""A replica of two ranks on two nodes of a cluster, over HTTP: the answers of one rank, and one end for both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from grammars import make_model
from liveness import lives

from sgray.config import Config
from sgray.launch_server import free_ports
from sgray.local import LocalModel
from sgray.protocol import SamplingParams

ROOT = Path(__file__).parents[3]
PROMPT = "Once upon a time"
START_S = 240.0  # of the cluster and of what runs on it, on a machine that has other things to do


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A tiny random model whose heads two ranks can share."""
    return make_model(tmp_path_factory.mktemp("nodes"), model_dir)


@dataclass(frozen=True)
class TwoNodes:
    """The service, and the process that started it."""

    service: Any
    process: psutil.Process

    def the(self, words: str) -> psutil.Process:
        """The one process of this cluster with these words on its command line."""
        found = [one for one in self.process.children(recursive=True) if words in command(one)]
        assert len(found) == 1, list(map(command, found))
        return found[0]

    @property
    def replica(self) -> psutil.Process:
        """The engine replica that is rank 0."""
        return self.the("ServeReplica:sgray:LLMReplica")

    @property
    def far_rank(self) -> psutil.Process:
        """Rank 1, a child of the actor that is its host."""
        return self.the("sgray.engine.rank")


@pytest.fixture(scope="module")
def nodes(twin: Path, service_type: Any) -> Iterator[TwoNodes]:
    [port] = free_ports(1)
    args = {
        "model": {"model_path": str(twin), "served_model_name": "twin", "dtype": "float32", "device": "cpu"},
        "parallel": {"tp_size": 2, "nnodes": 2},
        "memory": {"max_total_tokens": 4096},
        "serve": {
            "num_cpus_per_replica": 0.5,
            "num_cpus_per_ingress": 0.1,
            "num_ingress_replicas": 1,
            "health_check_period_s": 0.5,
            "graceful_shutdown_timeout_s": 10.0,
        },
    }
    with tempfile.TemporaryDirectory(prefix="sgray-n-", ignore_cleanup_errors=True) as scratch:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": scratch,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        }
        environment.pop("RAY_ADDRESS", None)
        command_line = [sys.executable, str(ROOT / "tests/support/ray_nodes.py"), str(port), json.dumps(args)]
        with (
            Path(scratch, "output").open("w") as output,
            subprocess.Popen(
                command_line, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output
            ) as process,
        ):
            found = TwoNodes(service_type(f"http://127.0.0.1:{port}"), psutil.Process(process.pid))
            try:
                found.service.until(lambda: is_linked(found, process, Path(scratch, "output")), "it is up", START_S)
                yield found
            finally:
                left = found.process.children(recursive=True) if process.poll() is None else []
                assert process.stdin is not None
                process.stdin.close()
                process.wait(120)
                _, alive = psutil.wait_procs(left, 30)
                assert not alive


def is_linked(nodes: TwoNodes, process: subprocess.Popen[bytes], output: Path) -> bool:
    said = output.read_text()
    assert process.poll() is None, said
    return "up" in said.splitlines() and len(nodes.service.figures()["sgray:num_running_reqs"]) == 1


def command(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def alone(twin: Path) -> str:
    """What one rank in this process says."""
    config = Config.parse(
        {"model": {"model_path": str(twin), "dtype": "float32"}, "memory": {"max_total_tokens": 1024}}
    )
    return "".join(LocalModel.load(config).complete(PROMPT, SamplingParams(temperature=0, max_new_tokens=12)))


def complete(nodes: TwoNodes) -> str:
    client = nodes.service.openai(max_retries=0).with_options(timeout=START_S)
    return client.completions.create(model="twin", prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text


def test_ranks_on_two_nodes_answer_as_one(nodes: TwoNodes, alone: str) -> None:
    assert complete(nodes) == alone
    host = nodes.far_rank.parent()
    assert host is not None and "RankHost" in command(host)
    assert host.ppid() != nodes.replica.ppid(), "each raylet starts the processes of its node"


def test_a_killed_rank_on_another_node_restarts_the_replica_which_answers(nodes: TwoNodes, alone: str) -> None:
    old_replica, old_rank = nodes.replica, nodes.far_rank
    old_rank.kill()
    assert complete(nodes) == alone, "the call waits for the replica that comes after this one"
    nodes.service.until(lambda: not lives(old_replica), "the old replica is gone", 60)
    assert lives(nodes.replica) and lives(nodes.far_rank)
    assert not lives(old_rank)


def test_a_killed_replica_leaves_nothing_on_the_other_node(nodes: TwoNodes) -> None:
    replica, rank = nodes.replica, nodes.far_rank
    host = rank.parent()
    assert host is not None
    replica.kill()
    nodes.service.until(lambda: not lives(rank) and not lives(host), "nothing is left", 30)
