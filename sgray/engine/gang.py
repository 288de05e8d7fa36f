"""A model over several ranks as one executor: this process is rank 0, the others are processes of their own, here or on
other nodes.

Every rank gets every plan and executes it alone but for what the layers exchange; all end a step with the same scores
and draw the same tokens, so that only rank 0's result is looked at. A gang lives and dies whole: the first error or
loss of any rank is the end of all, and whoever watches the replica starts another one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from sgray.config import Config
from sgray.engine.nodes import Far, Nodes, gather
from sgray.engine.plan import Executor, StepPlan, StepResult
from sgray.engine.rank import Hello
from sgray.engine.ranks import Ranks
from sgray.errors import DeviceLostError
from sgray.parallel.comm import Comm, MeetingPlace, connect
from sgray.parallel.mesh import Mesh


class Gang:
    """Start it, meet, connect, build rank 0's runner, lead; then it executes plans."""

    def __init__(self, ranks: Ranks, meeting: MeetingPlace, mesh: Mesh) -> None:
        self._ranks = ranks
        self._meeting = meeting
        self._mesh = mesh
        self._encoder = msgspec.msgpack.Encoder()
        self._runner: Executor | None = None

    @classmethod
    def start(cls, config: Config, model_dir: Path, nodes: Nodes | None = None) -> Gang:
        """Processes for ranks 1 and up, with the help of `nodes` where some are elsewhere. `config` is resolved."""
        parallel = config.parallel
        meeting = MeetingPlace.on_this_node() if nodes is None else MeetingPlace.at(nodes.address)
        far: list[Far] = []
        hosts: list[Far] = []
        try:
            if nodes is not None:
                far, hosts = gather(nodes, parallel)
            for number, rank in enumerate(far, start=parallel.ranks_per_node):
                rank.line.send(_hello(config, None, number, meeting.place, rank.address))
            here = (
                _hello(config, model_dir, number, meeting.place, meeting.address)
                for number in range(1, parallel.ranks_per_node)
            )
            return cls(Ranks(here, far, hosts), meeting, Mesh(0, parallel.tp_size, parallel.nnodes))
        except BaseException:
            for member in (*far, *hosts):
                member.close()
            meeting.close()
            raise

    def meet(self) -> None:
        """Wait until every rank has come as far as this one. DeviceLostError if one never will."""
        self._ranks.meet()

    def connect(self, device: torch.device) -> Comm:
        """Rank 0's way to the others, once all have met."""
        return connect(self._mesh, self._meeting.place, self._meeting.address, device)

    def lead(self, runner: Executor) -> None:
        """From now on this is an executor, and `runner` is rank 0's part in it."""
        self.meet()
        self._ranks.expect_beats()
        self._runner = runner
        self._meeting.leave()

    def cause(self) -> str | None:
        """The loss of a rank that is behind an error, if one is."""
        return self._ranks.cause()

    @property
    def processes(self) -> list[int]:
        """The ids of the processes of ranks 1 and up on this node."""
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
        self._meeting.close()

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


def _hello(config: Config, model_dir: Path | None, rank: int, place: str, address: str) -> bytes:
    path = None if model_dir is None else str(model_dir)
    return msgspec.msgpack.encode(Hello(config.model_dump(), path, rank, place, address))
