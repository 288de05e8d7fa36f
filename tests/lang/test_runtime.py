"""`Runtime`: a server in a process of its own, for the programs of this one, and nothing left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import sgray as sgl
from sgray.errors import ConfigError
from sgray.lang.errors import EndpointError
from sgray.supervisor import ServerDiedError

ROOT = Path(__file__).parents[2]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
ARGUMENTS = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "num_threads": 1}


@sgl.function
def branched(s):
    s += sgl.user("你好。Name a colour.")
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += sgl.assistant(f"{number}: " + sgl.gen("a", **GREEDY))
    forks.join()
    s += sgl.assistant("So: " + sgl.select("b", ["yes", "no", "no more"]))


def until_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.timeout(300)
def test_a_runtime_says_what_an_engine_says_and_leaves_no_process(toy: sgl.Engine) -> None:
    model = toy.config.model.model_path
    with sgl.Runtime(model, **ARGUMENTS) as runtime:
        server = psutil.Process(runtime._server.pid)
        started = [server, *server.children(recursive=True)]
        assert len(started) > 2
        sgl.set_default_backend(runtime)
        try:
            there = branched.run()
        finally:
            sgl.set_default_backend(None)
        here = branched.run(backend=toy)
        assert (there["a"], there["b"], there.text()) == (here["a"], here["b"], here.text())
        told = runtime.generate(["One", "两"], GREEDY)
        assert [one["text"] for one in told] == [one["text"] for one in toy.generate(["One", "两"], GREEDY)]
        assert runtime.get_server_info()["model_path"] == model
        assert runtime.flush_cache() is True
    until_gone(started)
    with pytest.raises(EndpointError, match="cannot reach"):
        branched.run(backend=runtime)
    runtime.shutdown()


@pytest.mark.timeout(120)
def test_nothing_is_left_of_a_runtime_whose_process_was_killed(toy: sgl.Engine) -> None:
    script = f"import sgray as sgl; sgl.Runtime({toy.config.model.model_path!r}, **{ARGUMENTS!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as owner:
        deadline = time.monotonic() + 60
        while len(started := psutil.Process(owner.pid).children(recursive=True)) < 2:  # the server and what it starts
            assert time.monotonic() < deadline
            time.sleep(0.05)
        owner.kill()
    until_gone(started)


@pytest.mark.timeout(120)
def test_a_runtime_that_dies_at_the_start_tells_its_last_words(tmp_path) -> None:
    with pytest.raises(ServerDiedError, match=r"no config\.json"):
        sgl.Runtime(str(tmp_path))
    with pytest.raises(ConfigError, match="nearest known one"):
        sgl.Runtime(str(tmp_path), mem_fraction=0.5)
