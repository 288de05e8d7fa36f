"""Ranks as threads of one process: each has its own part of a model, and what they draw must be the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sgray.config import Config
from sgray.engine.executor import build_runner, load_executor, measure_hardware
from sgray.engine.plan import Executor, StepPlan, StepResult
from sgray.memory.pool import KVPool
from sgray.models.spec import served_spec
from sgray.parallel.comm import GlooComm
from sgray.parallel.mesh import Mesh

Value = TypeVar("Value")


class ThreadRanks:
    """An executor of `size` ranks; a step's result is that of rank 0, and equal to all others."""

    depth = 0

    def __init__(self, config: Config, model_dir: Path, size: int) -> None:
        config = config.resolve(measure_hardware())
        spec, store, barrier = served_spec(model_dir, config), dist.HashStore(), threading.Barrier(size, timeout=60)
        self._threads = ThreadPoolExecutor(size)
        self._size = size

        def meet() -> None:
            barrier.wait()

        def build(rank: int) -> tuple[Executor, KVPool]:
            mesh = Mesh(rank, size)
            comm = GlooComm(mesh, store, 20.0)
            return build_runner(config, spec, model_dir, mesh, comm, meet)

        threads = torch.get_num_threads()
        built = self._on_ranks(build)
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
        info = load_executor(Config.parse(values))[1]
        return cls(Config.parse({**values, "parallel": {"tp_size": size}}), model_dir, size), info

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
        return list(self._threads.map(work, range(self._size)))
