"""The tensor behind page ids."""

from __future__ import annotations

import pytest
import torch

from sgray.config import MemoryConfig
from sgray.errors import ConfigError
from sgray.memory.pool import CPU_MAX_BYTES, KVPool, PoolShape, plan_num_pages

SHAPE = PoolShape(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")
GIB = 2**30


def filled_pool(num_pages: int = 5) -> KVPool:
    pool = KVPool(num_pages, SHAPE, CPU)
    pool.pages.copy_(torch.randn(pool.pages.shape))
    return pool


def test_a_page_is_one_contiguous_block_over_all_layers() -> None:
    pool = filled_pool()
    assert pool.pages[1].is_contiguous()
    assert pool.pages[1].numel() * 4 == SHAPE.page_bytes
    assert pool.pages[1].data_ptr() - pool.pages.data_ptr() == SHAPE.page_bytes


def test_rows_are_the_same_memory() -> None:
    pool = filled_pool()
    page, layer, side, token = 3, 2, 1, 1
    row = ((page * 3 + layer) * 2 + side) * 4 + token
    assert torch.equal(pool.rows[row], pool.pages[page, layer, side, token].flatten())


def test_unwritten_tokens_are_finite() -> None:
    assert bool(KVPool(4, SHAPE, CPU).pages.isfinite().all())


def test_copying_takes_whole_pages_and_nothing_else() -> None:
    pool = filled_pool()
    before = pool.pages.clone()
    pool.copy_pages([(0, 2), (4, 1)])
    assert torch.equal(pool.pages, before[[0, 4, 0, 3, 4]])


def test_copies_are_done_in_order() -> None:
    pool = filled_pool()
    before = pool.pages.clone()
    pool.copy_pages([(0, 1), (1, 2)])
    assert torch.equal(pool.pages, before[[0, 0, 0, 3, 4]])


def test_clearing_leaves_other_pages_alone() -> None:
    pool = filled_pool()
    before = pool.pages.clone()
    pool.clear_pages([1])
    assert not pool.pages[1].any()
    assert torch.equal(pool.pages[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def plan(free_bytes: int, *, is_cpu: bool = True, **memory: float) -> int:
    return plan_num_pages(MemoryConfig(**memory), SHAPE, free_bytes=free_bytes, is_cpu=is_cpu)


def test_max_total_tokens_decides_the_size() -> None:
    assert plan(0, max_total_tokens=1000) == 250
    assert plan(0, max_total_tokens=1003) == 250


def test_less_than_a_page_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_total_tokens 3 .*4 tokens"):
        plan(GIB, max_total_tokens=3)


def test_a_cpu_pool_is_modest() -> None:
    assert plan(4 * GIB) * SHAPE.page_bytes <= GIB
    assert plan(1000 * GIB) * SHAPE.page_bytes <= CPU_MAX_BYTES
    assert plan(1000 * GIB) * SHAPE.page_bytes > 0.99 * CPU_MAX_BYTES


def test_a_gpu_pool_takes_its_fraction() -> None:
    assert plan(GIB, is_cpu=False, mem_fraction_static=0.5) == GIB // 2 // SHAPE.page_bytes


def test_a_small_fraction_holds_on_a_cpu_too() -> None:
    assert plan(GIB, mem_fraction_static=0.1) == int(GIB * 0.1) // SHAPE.page_bytes


def test_no_memory_at_all_is_said() -> None:
    with pytest.raises(ConfigError, match="no memory for key-value pages"):
        plan(1000)
