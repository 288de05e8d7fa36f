"""What the ranks of one model tell each other: sums and gathered parts of tensors.

A group is an object and no state of the process, so one process may hold several. Knows neither layers nor plans. A
single rank has the form without a group, whose every operation gives its argument back.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sgray.parallel.mesh import Mesh


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


TIMEOUT_S = 8.0  # between the same call on two ranks, which are equally busy


class SingleRank:
    """The only rank: nobody to talk to, nothing to pay."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class GlooComm:
    """Ranks of one machine, over gloo and the loopback device.

    Built by all ranks at once around one `store`; a rank that does not come, or falls silent in an operation, is a
    RuntimeError on the others after `timeout_s` seconds, and one that dies is one at once.
    """

    def __init__(self, mesh: Mesh, store: dist.Store, timeout_s: float) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs know only its name
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
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


def connect(mesh: Mesh, path: Path, device: torch.device) -> Comm:
    """The group of all ranks that call this with the same `path`, a file that need not exist."""
    store = dist.FileStore(str(path), mesh.tp_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return NcclComm(mesh, store)
    return GlooComm(mesh, store, TIMEOUT_S)


def least(comm: Comm, number: int, device: torch.device) -> int:
    """The smallest of the numbers that the ranks bring."""
    return int(comm.all_gather(torch.tensor([number], device=device)).min())
