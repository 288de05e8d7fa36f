"""The life of a rank other than the first: a process that executes the plans that rank 0 sends, and tells nobody.

It has its own part of the model and computes the same tokens as rank 0, so there is nothing to answer. It ends when
its stdin ends, and ends itself at the first error: ranks that have parted never compute right again.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from sgray.config import Config
from sgray.engine.plan import StepPlan
from sgray.engine.ranks import BEAT, BEAT_S, FAILED, MAX_SAID_BYTES, MET
from sgray.errors import SgrayError
from sgray.parallel.mesh import Mesh
from sgray.parallel.pipes import receive

# A rank with a GPU has a core to spare, and its next plan mostly comes within a step. On the host of an H200, a virtual
# machine, a plan takes 0.17 ms to a rank that looks for it and 0.23 ms to one that sleeps, where plans come 0.5 ms
# after each other; 0.25 and 0.35 ms where they come 8 ms after each other.
SPIN_S = 0.02


class Hello(msgspec.Struct):
    """The first message to a rank: a resolved configuration, which rank it is, and the place where ranks find others.

    `model_dir` is None on another node than rank 0's, where the model may lie elsewhere, and `address` the rank's own.
    """

    values: dict[str, Any]
    model_dir: str | None
    rank: int
    store: str
    address: str


class Left(Exception):
    """Rank 0 is gone."""


class Reports:
    """The way up: beats from a thread of its own, meetings and the reason of the end from the main one."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def start_beats(self) -> None:
        """Beat until the process ends, and end it when nobody hears."""
        threading.Thread(target=self._beat, name="sgray-beat", daemon=True).start()

    def meet(self) -> None:
        """Say so and wait for the word to go on. Raises Left."""
        self._say(MET)
        if receive(0) is None:
            raise Left

    def fail(self, reason: str) -> None:
        """The last thing that is said, if somebody still hears."""
        self._lock.acquire()  # for good: no beat follows
        with contextlib.suppress(OSError):
            os.write(self._pipe, (FAILED + reason.encode())[:MAX_SAID_BYTES])

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._say(BEAT)

    def _say(self, word: bytes) -> None:
        try:
            with self._lock:
                os.write(self._pipe, word)
        except OSError:
            os._exit(0)


def serve() -> None:
    """The whole life of the process."""
    reports = Reports(os.dup(1))
    os.dup2(2, 1)  # whatever is printed is no report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; rank 0 decides what it means
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    reports.start_beats()
    status = 0
    try:
        raw = receive(0)
        if raw is not None:
            _run(msgspec.msgpack.decode(raw, type=Hello), reports)
    except Left:
        pass
    except BaseException as error:
        logging.getLogger(__name__).exception("this rank ends")
        reports.fail(error.message if isinstance(error, SgrayError) else f"{type(error).__name__}: {error}")
        status = 1
    os._exit(status)  # the others may be gone, and what would be tidied up with them waits for them


def _run(hello: Hello, reports: Reports) -> None:
    from sgray.engine.executor import build_runner, rank_device  # torch takes seconds, in which beats are heard
    from sgray.models.spec import served_spec
    from sgray.parallel.comm import connect

    config = Config.parse(hello.values)
    mesh = Mesh(hello.rank, config.parallel.tp_size, config.parallel.nnodes)
    model_dir = _model_dir(config) if hello.model_dir is None else Path(hello.model_dir)
    reports.meet()
    device = rank_device(config, mesh)
    comm = connect(mesh, hello.store, hello.address, device)
    spec = served_spec(model_dir, config)
    runner, _ = build_runner(config, spec, model_dir, mesh, comm, reports.meet)
    gc.collect()
    gc.freeze()  # what was loaded stays, and is many objects for the collector to walk over between two steps
    reports.meet()
    decoder = msgspec.msgpack.Decoder(StepPlan)
    num_in_flight = 0
    spin_s = SPIN_S if device.type == "cuda" else 0.0
    while (raw := receive(0, spin_s)) is not None:
        runner.submit(decoder.decode(raw))
        num_in_flight += 1
        if num_in_flight > runner.depth:
            runner.collect()
            num_in_flight -= 1


def _model_dir(config: Config) -> Path:
    """Where the model is on this node, fetched by one of its ranks where it is not there yet."""
    from sgray.models.hub import resolve_model

    return resolve_model(config.model.model_path, revision=config.model.revision, progress=False)
