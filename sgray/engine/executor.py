"""Builds everything that has torch in it, and the seam through which the scheduler's plans reach it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from sgray.config import Config, Hardware, may_share_gpus
from sgray.engine.gang import Gang
from sgray.engine.nodes import Nodes
from sgray.engine.plan import Executor
from sgray.engine.runner import ModelRunner
from sgray.errors import ConfigError, EngineError
from sgray.layers.backends.torch_sdpa import TorchBackend
from sgray.layers.linear import Placement
from sgray.layers.quant.unquantized import Unquantized
from sgray.memory.pool import KVPool, PoolShape, plan_num_pages
from sgray.models.decoder import Decoder
from sgray.models.dummy import fill_dummy
from sgray.models.hub import resolve_model
from sgray.models.loader import load_weights
from sgray.models.spec import ModelSpec, served_spec
from sgray.parallel.comm import Comm, SingleRank, least
from sgray.parallel.mesh import Mesh
from sgray.protocol import EngineInfo

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNLIMITED = 2**60  # cgroup version 1 writes "no limit" as a number near 2**63


def load_executor(config: Config, nodes: Nodes | None = None) -> tuple[Executor, EngineInfo]:
    """The model of `config`, loaded and ready, with the facts about it. `nodes` start ranks elsewhere.

    Raises ConfigError or ModelLoadError, before any weights are read where the configuration alone is wrong.
    """
    _check_nodes(config, nodes)
    hardware = measure_hardware()
    config = config.resolve(hardware)
    model_dir = resolve_model(config.model.model_path, revision=config.model.revision)
    spec = served_spec(model_dir, config)
    _check_devices(config)
    if config.parallel.tp_size == 1:
        executor, pool = build_runner(config, spec, model_dir, Mesh(), SingleRank(), lambda: None)
    else:
        executor, pool = _load_gang(config, spec, model_dir, nodes)
    return executor, _info(config, spec, model_dir, pool)


def build_runner(
    config: Config, spec: ModelSpec, model_dir: Path, mesh: Mesh, comm: Comm, meet: Callable[[], None]
) -> tuple[Executor, KVPool]:
    """What executes plans on one rank, with its part of the model, and its key-value memory. `config` is resolved.

    `meet` returns when all ranks have called it: each has read its weights then, which takes them unequally long.
    """
    device = rank_device(config, mesh)
    if device.type == "cpu":
        assert isinstance(config.model.num_threads, int), "resolved"
        torch.set_num_threads(max(1, config.model.num_threads // mesh.ranks_per_node))
    placement = Placement(mesh, DTYPES[config.model.dtype], device, comm)
    if device.type == "cuda":
        # Triton is needed here, and where ranks on GPUs connect.
        from sgray.engine.device_load import load_device_runner

        return load_device_runner(config, spec, model_dir, placement, free_memory_bytes, meet)
    model = Decoder(spec, placement, Unquantized())
    if config.model.load_format == "dummy":
        fill_dummy(model)
    else:
        load_weights(model, model_dir)
    meet()
    pool = _build_pool(config, spec, placement)
    num_heads, num_kv_heads = spec.query_rule.held(mesh), spec.kv_rule.held(mesh)
    backend = TorchBackend(num_heads, num_kv_heads, spec.head_dim, spec.windows, placement.dtype)
    return ModelRunner(model, pool, backend), pool


def rank_device(config: Config, mesh: Mesh) -> torch.device:
    """Where a rank computes: of several GPUs that the process sees, the one of its number on its node."""
    kind = config.model.device
    if kind != "cuda" or mesh.tp_size == 1:
        return torch.device(kind)
    return torch.device(kind, mesh.local_rank % torch.cuda.device_count() if may_share_gpus() else mesh.local_rank)


def _check_devices(config: Config) -> None:
    """Raises ConfigError where a rank of this node would have no GPU of its own."""
    parallel, num_here = config.parallel, torch.cuda.device_count()
    if config.model.device == "cuda" and num_here < parallel.ranks_per_node and not may_share_gpus():
        nodes = f" on {parallel.nnodes} nodes" if parallel.nnodes > 1 else ""
        raise ConfigError(
            f"parallel.tp_size {parallel.tp_size}{nodes} needs a GPU for each rank, and {num_here} can be seen here",
            param="tp_size",
        )


def _check_nodes(config: Config, nodes: Nodes | None) -> None:
    """Raises ConfigError where there should be several nodes and nobody can start ranks on them."""
    if config.parallel.nnodes > 1 and nodes is None:
        raise ConfigError(
            f"parallel.nnodes {config.parallel.nnodes}: only Ray Serve can start ranks on other nodes; deploy this "
            "configuration on a Ray cluster (docs/deploying.md), or set nnodes to 1 for an engine in this process",
            param="nnodes",
        )


def _load_gang(config: Config, spec: ModelSpec, model_dir: Path, nodes: Nodes | None) -> tuple[Executor, KVPool]:
    """This process as rank 0, and processes for the others, which read their parts at the same time."""
    gang = Gang.start(config, model_dir, nodes)
    try:
        gang.meet()
        mesh = Mesh(0, config.parallel.tp_size, config.parallel.nnodes)
        runner, pool = build_runner(config, spec, model_dir, mesh, gang.connect(rank_device(config, mesh)), gang.meet)
        gang.lead(runner)
        return gang, pool
    except BaseException as error:
        # What rank 0 can explain itself the others have met as well; other errors may be effects of what they met.
        fault = None if isinstance(error, ConfigError) else gang.cause()
        gang.close()
        if fault is not None:
            raise EngineError(f"the model could not be loaded: {fault}") from error
        raise


def measure_hardware() -> Hardware:
    """What this process may use: the CPUs it may run on and the memory its container leaves, whichever is less."""
    return Hardware(
        num_threads=_num_threads(),
        memory_bytes=free_memory_bytes(torch.device("cpu")),
        has_cuda=torch.cuda.is_available(),
        has_bfloat16=_has_fast_bfloat16(),
    )


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _system_free_bytes()
    limit = _read_limit("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    used = _read_limit("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _build_pool(config: Config, spec: ModelSpec, placement: Placement) -> KVPool:
    assert isinstance(config.memory.page_size, int), "resolved"
    mesh, num_kv_heads = placement.mesh, spec.kv_rule.held(placement.mesh)
    shape = PoolShape(spec.num_layers, config.memory.page_size, num_kv_heads, spec.head_dim, placement.dtype)
    num_pages = plan_num_pages(
        config.memory,
        shape,
        free_bytes=least(placement.comm, free_memory_bytes(placement.device), placement.device),
        is_cpu=True,
        num_sharing=mesh.ranks_per_node,
    )
    logger.info("key-value memory: %d pages of %d tokens", num_pages, shape.page_size)
    return KVPool(num_pages, shape, placement.device)


def _info(config: Config, spec: ModelSpec, model_dir: Path, pool: KVPool) -> EngineInfo:
    assert isinstance(config.schedule.max_running_requests, int), "resolved"
    return EngineInfo(
        model_name=config.model_name,
        model_dir=str(model_dir),
        architecture=spec.family.architecture,
        dtype=config.model.dtype,
        device=config.model.device,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        end_ids=spec.end_ids,
        page_size=pool.shape.page_size,
        num_pages=len(pool.pages),
        max_running_requests=config.schedule.max_running_requests,
    )


def _num_threads() -> int:
    """CPUs of the affinity mask, or fewer where the container's quota is smaller."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def _cpu_quota() -> float | None:
    """CPUs that the container's quota allows, None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        limit = _read_limit("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        interval = _read_limit("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
        return limit / interval if limit and interval else None
    return None if quota == "max" else int(quota) / int(period)


def _read_limit(*paths: str) -> int | None:
    """The number in the first of the files that exists; None for no limit."""
    for path in paths:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < UNLIMITED else None
    return None


def _system_free_bytes() -> int:
    """Memory that the system can still give out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; elsewhere it is converted to float32 and slower than that."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
