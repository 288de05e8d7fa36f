"""Ranks as threads of one process: each has its own part of a model, and what they draw must be the same.

They take turns: one computes until it waits for the others. So what is no matter of threads, as Triton's interpreter,
need not know of any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sgray.config import Config
from sgray.engine.executor import build_runner, load_executor, measure_hardware
from sgray.engine.plan import Executor, StepPlan, StepResult
from sgray.kernels.all_reduce.peers import Peers
from sgray.memory.pool import KVPool
from sgray.models.spec import served_spec
from sgray.parallel.comm import Comm, GlooComm
from sgray.parallel.mesh import Mesh

Value = TypeVar("Value")
Build = Callable[..., tuple[Executor, KVPool]]


class Turns:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    @contextmanager
    def mine(self) -> Iterator[None]:
        with self._turn:
            yield

    @contextmanager
    def given_up(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class TurnComm:
    """A communicator that gives up its turn while it waits."""

    def __init__(self, comm: Comm, turns: Turns) -> None:
        self._comm = comm
        self._turns = turns

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._turns.given_up():
            return self._comm.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        with self._turns.given_up():
            return self._comm.all_gather(x)

    def reach(self, x: Tensor) -> Peers | None:
        return self._comm.reach(x)


class ThreadRanks:
    """An executor of `size` ranks; a step's result is that of rank 0, and equal to all others."""

    def __init__(self, config: Config, model_dir: Path, size: int, build: Build = build_runner) -> None:
        config = config.resolve(measure_hardware())
        spec, store, barrier = served_spec(model_dir, config), dist.HashStore(), threading.Barrier(size, timeout=60)
        self._turns = Turns()
        self._threads = ThreadPoolExecutor(size)
        self._size = size
        with ThreadPoolExecutor(size) as pool:
            comms = list(pool.map(lambda rank: GlooComm(Mesh(rank, size), store, 20.0), range(size)))

        def meet() -> None:
            with self._turns.given_up():
                barrier.wait()

        def make(rank: int) -> tuple[Executor, KVPool]:
            return build(config, spec, model_dir, Mesh(rank, size), TurnComm(comms[rank], self._turns), meet)

        threads = torch.get_num_threads()
        built = self._on_ranks(make)
        torch.set_num_threads(threads)
        self.runners = [runner for runner, _ in built]
        self.pools = [pool for _, pool in built]

    @classmethod
    def load(cls, model_dir: Path, size: int, **sections: dict[str, Any]) -> tuple[ThreadRanks, Any]:
        """The ranks and the facts about the whole model."""
        values: dict[str, Any] = {
            "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cpu"},
            "memory": {"max_total_tokens": 4096},
            **sections,
        }
        info = load_executor(Config.parse({**values, "parallel": {}}))[1]
        parallel = {**sections.get("parallel", {}), "tp_size": size}
        return cls(Config.parse({**values, "parallel": parallel}), model_dir, size), info

    @property
    def depth(self) -> int:
        return self.runners[0].depth

    @property
    def reads_shared(self) -> bool:
        return self.runners[0].reads_shared

    def submit(self, plan: StepPlan) -> None:
        self._on_ranks(lambda rank: self.runners[rank].submit(plan))

    def collect(self) -> StepResult:
        results = self._on_ranks(lambda rank: self.runners[rank].collect())
        assert all(result == results[0] for result in results), "the ranks have parted"
        return results[0]

    def reset(self) -> None:
        for runner in self.runners:
            runner.reset()

    def fault(self) -> str | None:
        return None

    def close(self) -> None:
        self._threads.shutdown()

    def _on_ranks(self, work: Callable[[int], Value]) -> list[Value]:
        def in_turn(rank: int) -> Value:
            with self._turns.mine():
                return work(rank)

        return list(self._threads.map(in_turn, range(self._size)))
