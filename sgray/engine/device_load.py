"""From weights on a GPU to a runner that is ready: how much key-value memory there is, is measured, not guessed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sgray.config import Config
from sgray.engine.device_runner import Capacity, DeviceRunner
from sgray.errors import ConfigError
from sgray.layers.backends.kernel_attention import AttentionSizes
from sgray.layers.fused import KERNELS
from sgray.layers.linear import Placement
from sgray.layers.quant.unquantized import Unquantized
from sgray.memory.pool import KVPool, PoolShape, plan_num_pages
from sgray.models.decoder import Decoder
from sgray.models.dummy import fill_dummy
from sgray.models.loader import load_weights
from sgray.models.spec import ModelSpec
from sgray.parallel.comm import least

logger = logging.getLogger(__name__)

TOO_LITTLE = (
    "the GPU's memory does not suffice ({error}); lower memory.mem_fraction_static (fewer key-value pages), "
    "schedule.chunked_prefill_size (smaller steps) or schedule.max_running_requests, or use a smaller model"
)


def load_device_runner(
    config: Config,
    spec: ModelSpec,
    model_dir: Path,
    placement: Placement,
    free_memory: Callable[[torch.device], int],
    meet: Callable[[], None],
) -> tuple[DeviceRunner, KVPool]:
    """The model on its device, key-value memory, and a runner with its graphs captured. `config` is resolved.

    `meet` waits until the other ranks have read their weights too; what follows they do together.

    Raises ConfigError that says what to change where memory is short.
    """
    try:
        model = Decoder(spec, placement, Unquantized(KERNELS.product), KERNELS)
        if config.model.load_format == "dummy":
            fill_dummy(model)
        else:
            load_weights(model, model_dir)
        meet()
        begin = time.monotonic()
        runner, pool = _ready_runner(config, model, placement, free_memory)
        logger.info("ready %.1f s after the weights were loaded", time.monotonic() - begin)
        return runner, pool
    except torch.OutOfMemoryError as error:
        raise ConfigError(TOO_LITTLE.format(error=str(error).splitlines()[0])) from None


def _ready_runner(
    config: Config, model: Decoder, placement: Placement, free_memory: Callable[[torch.device], int]
) -> tuple[DeviceRunner, KVPool]:
    spec, device = model.spec, placement.device
    assert isinstance(config.memory.page_size, int), "resolved"
    num_heads, num_kv_heads = spec.query_rule.held(placement.mesh), spec.kv_rule.held(placement.mesh)
    shape = PoolShape(spec.num_layers, config.memory.page_size, num_kv_heads, spec.head_dim, placement.dtype)
    capacity = _capacity(config, spec)
    sizes = AttentionSizes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        max_sequences=capacity.max_sequences,
        max_tokens=capacity.max_tokens,
        max_length=capacity.max_length,
    )
    # The largest step, on a pool of one page, makes the allocator take what such a step needs; it keeps that.
    DeviceRunner(model, KVPool(1, shape, device), capacity, sizes).try_largest()
    free_bytes = least(placement.comm, free_memory(device), device)
    num_pages = plan_num_pages(config.memory, shape, free_bytes=free_bytes, is_cpu=device.type == "cpu")
    logger.info("key-value memory: %d pages of %d tokens", num_pages, shape.page_size)
    pool = KVPool(num_pages, shape, device)
    runner = DeviceRunner(model, pool, capacity, sizes)
    runner.capture()
    return runner, pool


def _capacity(config: Config, spec: ModelSpec) -> Capacity:
    schedule = config.schedule
    running, budget, largest = (
        schedule.max_running_requests,
        schedule.chunked_prefill_size,
        schedule.cuda_graph_max_bs,
    )
    assert isinstance(running, int) and isinstance(budget, int) and isinstance(largest, int), "resolved"
    return Capacity(
        max_sequences=running,
        max_tokens=max(running, budget),
        max_length=spec.context_length,
        max_graph=0 if schedule.disable_cuda_graph else min(running, largest),
    )
