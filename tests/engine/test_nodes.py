"""A model over processes of several hosts: the tokens of one, and one end for all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from grammars import asking, run
from liveness import lives
from local_nodes import LocalNodes
from twins import make_twin
from waiting import until

from sgray.config import Config
from sgray.engine import ranks
from sgray.engine.engine import Engine
from sgray.engine.executor import load_executor
from sgray.engine.gang import Gang
from sgray.engine.nodes import Invitation
from sgray.errors import ConfigError, EngineError, ModelLoadError
from sgray.parallel.sockets import KEY_BYTES

LIMIT_S = 60.0


def config_of(model_dir: Path | str, size: int, num_nodes: int) -> Config:
    return Config.parse(
        {
            "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cpu"},
            "memory": {"max_total_tokens": 2048},
            "schedule": {"random_seed": 1, "chunked_prefill_size": 64},
            "parallel": {"tp_size": size, "nnodes": num_nodes},
        }
    )


def far_ranks(nodes: LocalNodes) -> list[psutil.Process]:
    return [child for host in nodes.hosts for child in psutil.Process(host.pid).children()]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("twin"), num_hidden_layers=1, num_attention_heads=4)


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    with closing(LocalNodes()) as nodes:
        yield nodes


@pytest.fixture
def gang(twin: Path, nodes: LocalNodes) -> Iterator[tuple[Engine, list[psutil.Process]]]:
    """An engine of two ranks on two nodes, and the rank that is not here."""
    config = config_of(twin, 2, 2)
    with closing(Engine.load(config, nodes)) as engine:
        yield engine, far_ranks(nodes)


def test_four_ranks_on_two_nodes_answer_as_one_and_closing_ends_them(twin: Path, nodes: LocalNodes) -> None:
    def answer(engine: Engine) -> list[int]:
        return run(engine, [asking("a", [5, 7, 11] * 30, None, 12), asking("b", [6] * 9, None, 3)])["a"].tokens

    with closing(Engine.load(config_of(twin, 1, 1))) as alone:
        expected = answer(alone)
    config = config_of(twin, 4, 2)
    executor, info = load_executor(config, nodes)
    assert isinstance(executor, Gang)
    far = far_ranks(nodes)
    assert (len(executor.processes), len(far)) == (1, 2)
    with closing(Engine(executor, info, config)) as engine:
        assert answer(engine) == expected
        engine.close()
    nodes.close()
    assert not any(lives(one) for one in far)


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
def test_a_killed_rank_elsewhere_ends_the_gang(gang: tuple[Engine, list[psutil.Process]], is_busy: bool) -> None:
    engine, [rank] = gang
    if is_busy:
        engine.add(asking("cut", [6] * 9, None, 200))
        engine.step()
    rank.kill()
    if is_busy:
        deltas = [delta for _ in range(300) if engine.has_work for delta in engine.step().deltas]
        [finish] = [delta.finish for delta in deltas if delta.finish is not None]
        assert finish.error is not None and finish.error.code == "device_lost"
    until(lambda: engine.fault, timeout_s=LIMIT_S)
    assert "rank 1 was killed by signal 9" in str(engine.fault)


def test_a_rank_elsewhere_that_is_stuck_ends_the_gang_and_is_killed(
    gang: tuple[Engine, list[psutil.Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SILENCE_S", 3.0)
    engine, [rank] = gang
    rank.suspend()
    until(lambda: engine.fault, timeout_s=LIMIT_S)
    assert "rank 1 at 127.0.0.1 has said nothing" in str(engine.fault)
    until(lambda: not lives(rank), timeout_s=LIMIT_S)


def test_a_host_that_is_killed_ends_the_gang_and_its_ranks(
    gang: tuple[Engine, list[psutil.Process]], nodes: LocalNodes
) -> None:
    engine, [rank] = gang
    nodes.hosts[0].kill()
    until(lambda: engine.fault, timeout_s=LIMIT_S)
    assert "the host of ranks at 127.0.0.1 has left" in str(engine.fault)
    until(lambda: not lives(rank), timeout_s=LIMIT_S)


class NoNodes(LocalNodes):
    """Hosts that cannot find rank 0."""

    def invite(self, invitations: list[Invitation]) -> None:  # type: ignore[override]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            nobody = probe.getsockname()[1]
        keys = (bytes(KEY_BYTES),) * 2
        super().invite([Invitation("127.0.0.1", nobody, 1, keys) for _ in invitations])


def test_hosts_that_do_not_come_are_an_error_that_says_so(twin: Path) -> None:
    with closing(NoNodes()) as nodes, pytest.raises(EngineError, match=r"host of ranks .* could not start: .*status 1"):
        Engine.load(config_of(twin, 2, 2), nodes)


def test_a_model_that_another_node_lacks_is_said(twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank looks for the model by its name, from its own directory."""
    monkeypatch.chdir(twin.parent)
    config = config_of(f"./{twin.name}", 2, 2)
    elsewhere = LocalNodesElsewhere()
    with (
        closing(elsewhere),
        pytest.raises((EngineError, ModelLoadError), match=r"rank 1 at 127\.0\.0\.1: .*does not exist"),
    ):
        Engine.load(config, elsewhere)


class LocalNodesElsewhere(LocalNodes):
    """Hosts with another working directory."""

    def invite(self, invitations: Any) -> None:
        here = Path.cwd()
        os.chdir("/")
        try:
            super().invite(invitations)
        finally:
            os.chdir(here)


def test_several_nodes_without_ray_are_refused_before_anything_starts(twin: Path) -> None:
    with pytest.raises(ConfigError, match=r"nnodes 2: only Ray Serve can .* set nnodes to 1"):
        Engine.load(config_of(twin, 2, 2))


ORPHANS = """
import sys, time
sys.path[:0] = [{root!r}, {support!r}]
import psutil
from local_nodes import LocalNodes
from sgray.config import Config
from sgray.engine.executor import load_executor
nodes = LocalNodes()
executor, _ = load_executor(Config.parse({values!r}), nodes)
found = [psutil.Process(host.pid) for host in nodes.hosts]
print(*[one.pid for host in found for one in (host, *host.children())], flush=True)
time.sleep(120)  # until the test kills it
"""


def test_hosts_and_their_ranks_end_with_rank_0(twin: Path) -> None:
    root = Path(__file__).parents[2]
    values = config_of(twin, 2, 2).model_dump()
    script = ORPHANS.format(root=str(root), support=str(root / "tests/support"), values=values)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        processes = [psutil.Process(int(word)) for word in leader.stdout.readline().split()]
        assert len(processes) == 2
        leader.send_signal(signal.SIGKILL)
    until(lambda: not any(lives(one) for one in processes), timeout_s=LIMIT_S)
