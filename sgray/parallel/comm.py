"""What the ranks of one model tell each other: sums and gathered parts of tensors.

A group is an object and no state of the process, so one process may hold several. Knows neither layers nor plans. A
single rank has the form without a group, whose every operation gives its argument back.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sgray.kernels.all_reduce.peers import Peers
from sgray.parallel.mesh import Mesh
from sgray.parallel.sockets import listen


class Comm(Protocol):
    """Operations that every rank calls in the same order with tensors of the same shape and type."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, equal to the bit on all of them; may be `x` itself, overwritten.

        Over gloo a sum of halves is float32.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """(..., tp_size * N) from each rank's (..., N): the parts side by side, in the order of the ranks."""
        ...

    def reach(self, x: Tensor) -> Peers | None:
        """The ranks' memories, for a kernel that sums rows like `x` on its way; None where `all_reduce` has to do it.

        The same on all ranks.
        """
        ...


LOOPBACK = "127.0.0.1"
_TCP = "tcp "
JOIN_S = 60.0  # for the first word with the store, which all come to at once
TIMEOUT_S = 8.0  # between the same call on two ranks, which are equally busy


class SingleRank:
    """The only rank: nobody to talk to, nothing to pay."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reach(self, x: Tensor) -> Peers | None:
        return None


class GlooComm:
    """Ranks over gloo, each reached by the others at its own `address`; the loopback's where one machine has them all.

    Built by all ranks at once around one `store`; a rank that does not come, or falls silent in an operation, is a
    RuntimeError on the others after `timeout_s` seconds, and one that dies is one at once.
    """

    def __init__(self, mesh: Mesh, store: dist.Store, timeout_s: float, address: str = LOOPBACK) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs know only its name
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = gloo(store, mesh.tp_rank, mesh.tp_size, options)
        self._size = mesh.tp_size

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            x = x.float()  # rounded at every addition, the sum would get worse with every rank
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self._size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def reach(self, x: Tensor) -> Peers | None:
        return None


class NcclComm:
    """Ranks with a GPU each, over NCCL. Operations are queued on the current stream and may be part of a CUDA graph."""

    def __init__(self, mesh: Mesh, store: dist.Store) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # a torch for CPUs lacks it
        self._group = nccl(store, mesh.tp_rank, mesh.tp_size, nccl.Options())
        self._size = mesh.tp_size

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._size, *x.shape)
        self._group._allgather_base(parts, x.contiguous()).wait()
        return torch.cat(parts.unbind(0), dim=-1)

    def reach(self, x: Tensor) -> Peers | None:
        return None


class MeetingPlace:
    """Where the ranks of one group find each other: a file or, for several nodes, a store in this process.

    `place` names it to the others, `address` is where other nodes reach this process.
    """

    def __init__(self, place: str, address: str, directory: Path | None, store: dist.Store | None) -> None:
        self.place = place
        self.address = address
        self._directory = directory
        self._store = store

    @classmethod
    def on_this_node(cls) -> MeetingPlace:
        """A file, in a directory that nobody else may look into."""
        directory = Path(tempfile.mkdtemp(prefix="sgray-ranks-"))
        return cls(str(directory / "store"), LOOPBACK, directory, None)

    @classmethod
    def at(cls, address: str) -> MeetingPlace:
        """A store that listens on this address."""
        with listen(address) as door:
            port = door.getsockname()[1]
            limit = timedelta(seconds=JOIN_S)
            # torch would listen on all addresses; the socket that it is handed listens on one.
            store = dist.TCPStore(address, port, None, True, limit, False, master_listen_fd=os.dup(door.fileno()))
        return cls(f"{_TCP}{address} {port}", address, None, store)

    def leave(self) -> None:
        """All have connected: the file may go. The store stays, for a group may look into it later."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Give it up. May be called twice."""
        self.leave()
        self._store = None


def connect(mesh: Mesh, place: str, address: str, device: torch.device) -> Comm:
    """The group of all ranks that call this with the same `place`: a file that need not exist, or a store's.

    `address` is where other nodes reach this rank.
    """
    if place.startswith(_TCP):
        host, port = place.removeprefix(_TCP).split()
        store: dist.Store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=JOIN_S))
    else:
        store = dist.FileStore(place, mesh.tp_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Triton is needed from here on.
        from sgray.parallel.symmetric import connect_gpus

        return connect_gpus(mesh, store, device)
    return GlooComm(mesh, store, TIMEOUT_S, address)


def least(comm: Comm, number: int, device: torch.device) -> int:
    """The smallest of the numbers that the ranks bring."""
    return int(comm.all_gather(torch.tensor([number], device=device)).min())
