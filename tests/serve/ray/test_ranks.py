"""A replica of two ranks over HTTP: the answers of one, and one end and one beginning for both ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from grammars import make_model

from sgray.config import Config
from sgray.errors import ConfigError
from sgray.local import LocalModel
from sgray.protocol import SamplingParams
from sgray.serve.build import build

NUM_ROUNDS = 2
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A tiny random model whose heads two ranks can share."""
    return make_model(tmp_path_factory.mktemp("ranks"), model_dir)


@pytest.fixture(scope="module")
def service(deploy: Callable[..., Any], twin: Path) -> Any:
    values = {"min_replicas": 1, "max_replicas": 1, "health_check_period_s": 0.5, "num_cpus_per_replica": 0.5}
    return deploy(values, model={"model_path": str(twin), "served_model_name": "twin"}, parallel={"tp_size": 2})


def gangs() -> dict[int, list[int]]:
    """The processes of engine replicas, each with those of its other ranks."""
    return {
        process.pid: [child.pid for child in process.children() if "sgray.engine.rank" in command(child)]
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:sgray:LLMReplica" in command(process)
    }


def command(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def has_another(replica: int) -> bool:
    """Whether another replica than this one has all of its ranks, and this one is gone."""
    found = gangs()
    return len(found) == 1 and replica not in found and all(len(others) == 1 for others in found.values())


def complete(service: Any, **more: Any) -> Any:
    body = {"model": "twin", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    return service.openai(max_retries=0).completions.create(**body)


@pytest.fixture(scope="module")
def alone(twin: Path) -> str:
    """What one rank in this process says."""
    config = Config.parse(
        {"model": {"model_path": str(twin), "dtype": "float32"}, "memory": {"max_total_tokens": 1024}}
    )
    sampling = SamplingParams(temperature=0, max_new_tokens=12)
    return "".join(LocalModel.load(config).complete(PROMPT, sampling))


def test_two_ranks_answer_over_http_as_one(service: Any, alone: str) -> None:
    answer = complete(service, logprobs=1)
    assert answer.choices[0].text == alone
    assert len(answer.choices[0].logprobs.tokens) == 12
    [others] = gangs().values()
    assert len(others) == 1


@pytest.mark.usefixtures("service")
def test_ranks_on_more_nodes_than_the_cluster_has_are_refused_with_what_to_do(twin: Path) -> None:
    with pytest.raises(ConfigError, match=r"nnodes 2: Ray's cluster has one node; start Ray on more.*nnodes to 1"):
        build({"model": {"model_path": str(twin)}, "parallel": {"tp_size": 2, "nnodes": 2}})


def test_a_killed_rank_restarts_its_gang_and_leaves_nothing(service: Any, alone: str) -> None:
    for _ in range(NUM_ROUNDS):
        [(replica, [other])] = gangs().items()
        os.kill(other, signal.SIGKILL)
        service.until(partial(has_another, replica), "a whole new gang is there", 120)
        service.until(lambda: len(service.figures()["sgray:num_running_reqs"]) == 1, "it is linked", 60)
        assert complete(service).choices[0].text == alone
        assert not psutil.pid_exists(other)
    service.assert_idle()
