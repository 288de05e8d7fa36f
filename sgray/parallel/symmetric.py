"""GPUs of one node that sum and gather small tensors through each other's memory, by kernels of this project.

What NCCL does for a small tensor takes longer than moving it. Memory that is mapped into every rank's process comes
from torch's symmetric memory; NVLink multicast is not used. Ranks that share a GPU, which NCCL refuses, do everything
this way, which is slow, since their processes compute in turns, and lets one GPU try what several do.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sgray.config import forbid_multicast
from sgray.kernels.all_reduce import kernel
from sgray.kernels.all_reduce.peers import MAX_RANKS, Peers, memory_bytes
from sgray.kernels.launch import features
from sgray.parallel.comm import Comm, NcclComm, least
from sgray.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

# Published for 8 H100: a one-shot sum in Triton takes 10.8 us for 8 KiB and 18.3 for 256 KiB, a two-shot one 15 to 19,
# NCCL 22 to 24, which wins beyond about 1 MiB. Two ranks move equally much in both forms, and meet once in one shot.
ONE_SHOT_BYTES = 256 * 1024
TWO_SHOT_BYTES = 1024 * 1024
# All programs wait at once, so a device with fewer multiprocessors is left to NCCL. The rooms hold what the limits
# allow in float32, and a row of 16384 elements: 8 MiB in all.
NUM_PROGRAMS = 64
ROOM_BYTES = 64 * 1024


class PeerComm:
    """Small tensors by kernels, up to limits in bytes that the rooms of `peers` allow. What is larger goes `beyond` or,
    without that, in pieces through the same kernels.

    Operations are queued on the current stream and may be part of a CUDA graph. A rank waits in its kernel for the
    others, without a limit, as NCCL's kernels do: one that has died is seen by whoever watches the processes, and
    ending a process ends its kernel.
    """

    def __init__(
        self, peers: Peers, beyond: Comm | None, *, one_shot: int = ONE_SHOT_BYTES, two_shot: int = TWO_SHOT_BYTES
    ) -> None:
        self._peers = peers
        self._beyond = beyond
        self._one_shot = one_shot
        self._two_shot = two_shot
        self._has_pdl = features(peers.addresses_R.device).has_pdl

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._beyond is not None and x.nbytes > self._two_shot:
            return self._beyond.all_reduce(x)
        x = x.contiguous()
        for piece in x.view(-1).split(self._two_shot // x.element_size()):
            is_one_shot = self._peers.size == 2 or piece.nbytes <= self._one_shot
            reduce = kernel.one_shot if is_one_shot else kernel.two_shot
            reduce(piece, self._peers, piece, pdl=self._has_pdl)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self._beyond is not None and x.nbytes > self._one_shot:
            return self._beyond.all_gather(x)
        x_TN = x.reshape(-1, x.shape[-1])
        num_rows, num_columns = x_TN.shape
        most = self._one_shot // x.element_size()
        width = min(num_columns, most)
        height = most // width
        out_TRN = x.new_empty(num_rows, self._peers.size, num_columns)
        for top in range(0, num_rows, height):
            for left in range(0, num_columns, width):
                rows, columns = slice(top, top + height), slice(left, left + width)
                kernel.all_gather(x_TN[rows, columns], self._peers, out_TRN[rows, :, columns], pdl=self._has_pdl)
        return out_TRN.view(*x.shape[:-1], self._peers.size * num_columns)

    def reach(self, x: Tensor) -> Peers | None:
        is_small = x.nbytes <= self._one_shot and kernel.fits_add_rms_norm(x, self._peers)
        return self._peers if is_small else None


def connect_gpus(mesh: Mesh, store: dist.Store, device: torch.device) -> Comm:
    """The best that the ranks' GPUs can do, the same on all. All ranks call it at once."""
    gpus = _all_gpus(mesh, store, device)
    if len(set(gpus)) < mesh.tp_size:
        logger.warning("ranks share a GPU: they compute in turns, and no NCCL is used")
        return PeerComm(share_memory(mesh, store, device), None)
    nccl = NcclComm(mesh, store)
    if not least(nccl, int(_can_reach(mesh, gpus, device)), device):
        return nccl
    peers = None
    try:
        peers = share_memory(mesh, store, device)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:  # torch's interface is not a public one
        logger.warning("no symmetric memory, all sums go over NCCL: %s", error)
    all_have = least(nccl, int(peers is not None), device)
    return PeerComm(peers, nccl) if peers is not None and all_have else nccl


def share_memory(mesh: Mesh, store: dist.Store, device: torch.device) -> Peers:
    """This rank's memory for exchanging small tensors, and the others'. All ranks call it at once.

    Raises RuntimeError where torch cannot map it.
    """
    forbid_multicast()
    own_store = dist.PrefixStore("symmetric memory", store)
    _count_alike(mesh, own_store, device)
    size = memory_bytes(NUM_PROGRAMS, ROOM_BYTES)
    memory, handle, group = _rendezvous(mesh.tp_rank, mesh.tp_size, own_store, size, device)
    begin = memory.data_ptr() - handle.buffer_ptrs[mesh.tp_rank]
    addresses_R = torch.tensor([address + begin for address in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return Peers(mesh.tp_rank, addresses_R, NUM_PROGRAMS, ROOM_BYTES, owner=(memory, handle, group))


def _rendezvous(
    rank: int, num_ranks: int, store: dist.Store, num_bytes: int, device: torch.device
) -> tuple[Tensor, Any, dist.ProcessGroup]:
    """Memory of zeros that the others of the group map as well, torch's handle of it, and the group."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory  # a torch for CPUs may lack them

    symmetric: Any = _SymmetricMemory
    name = f"sgray {uuid.uuid4()}"  # torch looks groups up by a name, which only has to be new in this process
    group = dist.ProcessGroup(store, rank, num_ranks)
    _register_process_group(name, group)  # type: ignore[arg-type]
    memory = symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)  # who has met this rank may write
    try:
        handle = symmetric.rendezvous(memory, name)
    except RuntimeError as error:
        if "group info" not in str(error):
            raise
        symmetric.set_group_info(name, rank, num_ranks, store)  # some versions look here
        handle = symmetric.rendezvous(memory, name)
    return memory, handle, group


def _count_alike(mesh: Mesh, store: dist.Store, device: torch.device) -> None:
    """Lets ranks meet that have met others before, as rank 0 has when it loads another engine.

    Torch numbers the keys under which ranks look for each other by a count of the whole process, and waits for ever
    for a rank that counts differently. Those behind meet themselves until they are as far as the first.
    """
    count = _met_alone(device)
    store.set(f"count {mesh.tp_rank}", str(count))
    most = max(int(store.get(f"count {rank}")) for rank in range(mesh.tp_size))
    while count < most:
        count = _met_alone(device)


def _met_alone(device: torch.device) -> int:
    """Torch's number of a meeting of this process alone."""
    store = dist.HashStore()
    _rendezvous(0, 1, store, 1, device)
    keys: list[str] = getattr(store, "list_keys", list)()  # not in every torch; then ranks must be new processes
    return max((int(found[1]) for key in keys if (found := re.search(r"/(\d+)/0$", key))), default=0)


def _all_gpus(mesh: Mesh, store: dist.Store, device: torch.device) -> list[str]:
    """Which GPU each rank has."""
    store.set(f"gpu {mesh.tp_rank}", _gpu(device.index))
    return [store.get(f"gpu {rank}").decode() for rank in range(mesh.tp_size)]


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _can_reach(mesh: Mesh, gpus: list[str], device: torch.device) -> bool:
    """Whether kernels of this device may use the memory of all the others."""
    if mesh.num_nodes > 1 or mesh.tp_size > MAX_RANKS or features(device).num_sms < NUM_PROGRAMS:
        return False
    seen = {_gpu(index): index for index in range(torch.cuda.device_count())}
    others = [gpu for rank, gpu in enumerate(gpus) if rank != mesh.tp_rank]
    return all(gpu in seen and torch.cuda.can_device_access_peer(device.index, seen[gpu]) for gpu in others)
