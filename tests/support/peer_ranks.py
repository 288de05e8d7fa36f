"""Ranks as processes that share memory: a mapped file under Triton's interpreter, a GPU's memory where there is one.

Kernels that wait for each other need processes: the interpreter runs one program after the other, and no two at once.
What they do is in this module, because a new process can import it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from sgray.kernels.all_reduce import kernel
from sgray.kernels.all_reduce.peers import LINE_WORDS, Peers, memory_bytes
from sgray.kernels.launch import features
from sgray.parallel.mesh import Mesh

LIMIT_S = 250.0  # on a machine that is busy with other things, starting takes most of it
REDUCE = {"one_shot": kernel.one_shot, "two_shot": kernel.two_shot}


class PeerRanks:
    """Processes, of which the first ones are the ranks of a group of any size, with a memory of its own."""

    def __init__(self, max_size: int, directory: Path, *, num_programs: int = 4, room_bytes: int = 32 * 1024) -> None:
        extent = (str(directory), num_programs, room_bytes)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, *extent), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """What the call gives on each of `size` ranks; of a list among `arguments` each gets its own entry."""
        for rank, pipe in enumerate(self._pipes[:size]):
            own = [each[rank] if isinstance(each, list) else each for each in arguments]
            pipe.send_bytes(pickle.dumps((work.__name__, size, own)))
        return [self._answer(pipe) for pipe in self._pipes[:size]]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, pipe: Connection) -> Any:
        assert pipe.poll(LIMIT_S), "a rank does not answer"
        answer = pickle.loads(pipe.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer


def reduced(peers: Peers, part: Tensor, kind: str, in_place: bool) -> Tensor:
    part = part.to(peers.addresses_R.device)
    out = part if in_place else torch.full_like(part, torch.nan)
    REDUCE[kind](part, peers, out)
    return out.cpu()


def normed(
    peers: Peers, part: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows of the part lie apart."""
    device = peers.addresses_R.device
    wide = torch.full((part.shape[0], part.shape[1] + 3), torch.nan, dtype=part.dtype, device=device)
    wide[:, : part.shape[1]] = part
    residual = residual.to(device)
    out = torch.full(part.shape, torch.nan, dtype=dtype, device=device)
    kernel.add_rms_norm(wide[:, : part.shape[1]], peers, residual, weight.to(device), eps, out)
    return residual.cpu(), out.cpu()


def gathered(peers: Peers, part: Tensor) -> Tensor:
    """The middle of wider rows, between which nothing is written."""
    part = part.to(peers.addresses_R.device)
    rows, columns = part.shape
    wide = torch.zeros(rows, peers.size, columns + 2, dtype=part.dtype, device=part.device)
    kernel.all_gather(part, peers, wide[:, :, 1:-1])
    return wide.cpu()


def many(peers: Peers, times: int, pause_s: float) -> list[float]:
    """Sums of different numbers in different forms one after the other, each rank slow at another time."""
    found = []
    for time_ in range(times):
        if pause_s and time_ % peers.size == peers.rank:
            time.sleep(pause_s)
        x = torch.full((900 if time_ % 3 else 3,), float(time_ * (peers.rank + 1)), device=peers.addresses_R.device)
        REDUCE["two_shot" if time_ % 2 else "one_shot"](x, peers, x)
        found.append(x)
    assert all((x == x[0]).all() for x in found)
    return [float(x[0]) for x in found]


def counted_from(peers: Peers, count: int) -> None:
    """As if this rank and all others had met `count` times."""
    memory = peers.owner[0] if isinstance(peers.owner, tuple) else peers.owner
    size = 4 * LINE_WORDS * peers.num_programs
    memory[peers.rank if memory.dim() == 2 else ...].view(-1)[:size].view(torch.int32).fill_(count)
    if memory.is_cuda:
        torch.cuda.synchronize()


def summed_and_gathered(peers: Peers, part: Tensor, limits: dict[str, int], store: str | None) -> tuple[Tensor, Tensor]:
    """By the communicator, which has gloo for what is large where there is a place to meet."""
    from sgray.parallel.comm import LOOPBACK, GlooComm
    from sgray.parallel.symmetric import PeerComm

    beyond = None
    if store is not None:
        file = dist.FileStore(store, peers.size)
        beyond = GlooComm(Mesh(peers.rank, peers.size), file, LIMIT_S, LOOPBACK)
    comm = PeerComm(peers, beyond, **limits)
    part = part.to(peers.addresses_R.device)
    return comm.all_gather(part).cpu(), comm.all_reduce(part).cpu()


def answered(peers: Peers, model_dir: str, values: dict[str, Any], requests: list[Any]) -> dict[str, Any]:
    """What an engine of this rank gives, over the runner of a GPU whose ranks sum by kernels."""
    from sgray.config import Config
    from sgray.engine.device_load import load_device_runner
    from sgray.engine.engine import Engine
    from sgray.engine.executor import load_executor, measure_hardware
    from sgray.layers.linear import Placement
    from sgray.models.spec import served_spec
    from sgray.parallel.symmetric import PeerComm

    config = Config.parse(values).resolve(measure_hardware())
    comm = PeerComm(peers, None)
    placement = Placement(Mesh(peers.rank, peers.size), torch.float32, peers.addresses_R.device, comm)
    spec = served_spec(Path(model_dir), config)
    runner, _ = load_device_runner(config, spec, Path(model_dir), placement, lambda _: 2**30, lambda: None)
    engine = Engine(runner, load_executor(config)[1], config)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            found[delta.id] += delta.tokens
    return found


def replayed(peers: Peers, times: int) -> tuple[list[float], float]:
    """A captured graph of three sums, so that it ends with another room than it began with; and microseconds a sum."""
    x = torch.zeros(4096, dtype=torch.bfloat16, device=peers.addresses_R.device)
    out, residual = torch.empty_like(x), torch.zeros(1, 4096, device=x.device)
    weight, normed_x = torch.ones(4096, device=x.device), torch.empty(1, 4096, device=x.device)

    pdl = features(x.device).has_pdl

    def step() -> None:
        kernel.one_shot(x, peers, out, pdl=pdl)
        kernel.two_shot(out, peers, out, pdl=pdl)
        kernel.add_rms_norm(out.view(1, -1), peers, residual, weight, 1e-5, normed_x, pdl=pdl)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = []
    begin = time.monotonic()
    for time_ in range(times):
        x.fill_(float(time_ % 16 + peers.rank))
        residual.zero_()
        graph.replay()
        found.append(residual[0].clone())
    torch.cuda.synchronize()
    microseconds = (time.monotonic() - begin) / times / 3 * 1e6
    assert all((one == one[0]).all() for one in found)
    return [float(one[0]) for one in found], microseconds


def _serve(pipe: Connection, rank: int, directory: str, num_programs: int, room_bytes: int) -> None:
    torch.set_num_threads(1)
    if triton.knobs.runtime.interpret:
        import interpreter

        interpreter.install()
        _yield_at_atomics()
    groups: dict[int, Peers] = {}
    while True:
        try:
            name, size, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if size not in groups:
                groups[size] = _peers(rank, size, Path(directory), num_programs, room_bytes)
            answer = getattr(sys.modules[__name__], name)(groups[size], *arguments)
        except Exception as error:
            answer = RuntimeError(f"rank {rank}: {error!r}")
        pipe.send_bytes(pickle.dumps(answer))


def _yield_at_atomics() -> None:
    """A rank that waits would keep the processor from the one that it waits for."""
    builder = triton.runtime.interpreter.InterpreterBuilder
    old = builder.create_atomic_rmw

    def create_atomic_rmw(*arguments: Any) -> Any:
        time.sleep(1e-4)
        return old(*arguments)

    builder.create_atomic_rmw = create_atomic_rmw


def _peers(rank: int, size: int, directory: Path, num_programs: int, room_bytes: int) -> Peers:
    if triton.knobs.runtime.interpret:
        each = memory_bytes(num_programs, room_bytes)
        memory = torch.from_file(str(directory / f"memory-{size}"), shared=True, size=size * each, dtype=torch.uint8)
        addresses = torch.arange(size) * each + memory.data_ptr()
        return Peers(rank, addresses, num_programs, room_bytes, owner=memory.view(size, each))
    from sgray.parallel.symmetric import share_memory

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return share_memory(Mesh(rank, size), dist.FileStore(str(directory / f"store-{size}"), size), device)
