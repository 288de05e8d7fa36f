"""A model over several ranks as one executor: this process is rank 0, the others are processes of their own.

Every rank gets every plan and executes it alone but for what the layers exchange; all end a step with the same scores
and draw the same tokens, so that only rank 0's result is looked at. A gang lives and dies whole: the first error or
loss of any rank is the end of all, and whoever watches the replica starts another one.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import torch

from sgray.config import Config
from sgray.engine.plan import Executor, StepPlan, StepResult
from sgray.engine.rank import Hello
from sgray.engine.ranks import Ranks
from sgray.errors import DeviceLostError
from sgray.parallel.comm import Comm, connect
from sgray.parallel.mesh import Mesh


class Gang:
    """Start it, meet, connect, build rank 0's runner, lead; then it executes plans."""

    def __init__(self, ranks: Ranks, directory: Path, size: int) -> None:
        self._ranks = ranks
        self._directory = directory
        self._size = size
        self._encoder = msgspec.msgpack.Encoder()
        self._runner: Executor | None = None

    @classmethod
    def start(cls, config: Config, model_dir: Path) -> Gang:
        """Processes for ranks 1 and up. `config` is resolved."""
        size = config.parallel.tp_size
        directory = Path(tempfile.mkdtemp(prefix="sgray-ranks-"))  # nobody else may look into it
        values, store = config.model_dump(), str(directory / "store")
        try:
            hellos = (Hello(values, str(model_dir), rank, size, store) for rank in range(1, size))
            return cls(Ranks(map(msgspec.msgpack.encode, hellos)), directory, size)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def meet(self) -> None:
        """Wait until every rank has come as far as this one. DeviceLostError if one never will."""
        self._ranks.meet()

    def connect(self, device: torch.device) -> Comm:
        """Rank 0's way to the others, once all have met."""
        return connect(Mesh(0, self._size), self._directory / "store", device)

    def lead(self, runner: Executor) -> None:
        """From now on this is an executor, and `runner` is rank 0's part in it."""
        self.meet()
        self._ranks.expect_beats()
        self._runner = runner
        shutil.rmtree(self._directory, ignore_errors=True)  # all have found each other

    def cause(self) -> str | None:
        """The loss of a rank that is behind an error, if one is."""
        return self._ranks.cause()

    @property
    def processes(self) -> list[int]:
        """The ids of the processes of ranks 1 and up."""
        return self._ranks.processes

    @property
    def depth(self) -> int:
        """That of rank 0."""
        return self._rank.depth

    @property
    def reads_shared(self) -> bool:
        """As rank 0 does."""
        return self._rank.reads_shared

    def submit(self, plan: StepPlan) -> None:
        """Tell all ranks, and do rank 0's part. Any error is a DeviceLostError."""
        message = self._encoder.encode(plan)
        self._check()
        try:
            self._ranks.send(message)
            self._rank.submit(plan)
        except Exception as error:
            raise self._lost(error) from error

    def collect(self) -> StepResult:
        """Rank 0's result. Any error is a DeviceLostError."""
        self._check()
        try:
            return self._rank.collect()
        except Exception as error:
            raise self._lost(error) from error

    def reset(self) -> None:
        """Rank 0 drops what is in flight; the others drop every result."""
        self._rank.reset()

    def fault(self) -> str | None:
        """Why the gang has ended, if it has."""
        return self._ranks.fault

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _rank(self) -> Executor:
        assert self._runner is not None, "lead() comes first"
        return self._runner

    def _check(self) -> None:
        if fault := self._ranks.fault:
            raise DeviceLostError(fault)

    def _lost(self, error: Exception) -> DeviceLostError:
        """The end of the gang: of a rank's loss, of which this error is an effect, or of the error itself."""
        if self._ranks.cause() is None:
            self._ranks.lose(f"rank 0: {type(error).__name__}: {error}")
        return DeviceLostError(str(self._ranks.fault))
