"""Attention of extends where loading and computing are the work of different warps: for Hopper alone, in Gluon.

Three groups of warps share a tile of 128 query rows: one only fetches keys and values, two compute 64 rows each, and
while a group waits for the tensor cores the other does its softmax. A group itself has the product of the next keys
under way during the softmax of these (FlashAttention-3's schedule, arXiv 2407.08608). Queries and weights stay in
registers, so that shared memory feeds the tensor cores with keys and values only.

Neither windows, caps nor sinks: those are the plain kernel's, which reads the same plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sgray.kernels.extend_attention.work import ExtendPlan
from sgray.kernels.launch import features

ROWS = 128  # of a tile; each of two groups of warps has half of them
KEYS = 64  # at a time
STAGES = 4  # keys and values under way. Measured at 8192 tokens, in TFLOP/s: 624 with 4, 534 with 3, 550 with 2
COMPUTE_REGISTERS, FETCH_REGISTERS = 240, 24  # of a thread
REGISTERS = 168  # of a thread when all groups begin: three times 128 threads share 64 Ki
HEAD_DIMS = (64, 128)


@dataclass(frozen=True, slots=True)
class FlatPages:
    """One layer's keys and values as rows of K * D numbers, for bulk loads; a page begins `stride` rows after the one
    before it."""

    keys: TensorDescriptor
    values: TensorDescriptor
    stride: int


def flat_pages(keys: Tensor, values: Tensor) -> FlatPages | None:
    """None where this kernel cannot run: it takes whole boxes (see `boxes_of`) of two-byte numbers, on Hopper."""
    row = keys.shape[2] * keys.shape[3]
    is_fit = features(keys.device).has_wgmma and keys.itemsize == 2 and keys.shape[3] in HEAD_DIMS
    is_flat = keys.stride(0) % row == 0 and keys.stride(1) == row and keys.data_ptr() % 16 == 0
    if not (is_fit and is_flat and keys.shape[1] >= KEYS):
        return None
    return FlatPages(_describe(keys), _describe(values), keys.stride(0) // row)


def _describe(pages: Tensor) -> TensorDescriptor:
    num_pages, page_size, num_kv_heads, head_dim = pages.shape
    row = num_kv_heads * head_dim
    num_rows = (num_pages - 1) * (pages.stride(0) // row) + page_size
    flat = pages.as_strided((num_rows, row), (row, 1))
    return TensorDescriptor(flat, [num_rows, row], [row, 1], [KEYS, head_dim], layout_of(str(pages.dtype), head_dim))


def layout_of(dtype: str, head_dim: int) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory, for "torch.bfloat16" or "torch.float16"."""
    return gl.NVMMASharedLayout.get_default_for([KEYS, head_dim], getattr(gl, dtype.removeprefix("torch.")))


def attend(
    query_THD: Tensor,
    pages: FlatPages,
    page_table_SP: Tensor,
    plan: ExtendPlan,
    out_THD: Tensor,
    *,
    page_size: int,
    num_kv_heads: int,
    scale: float,
) -> None:
    """`attend_extends` of the package for a plan with tiles of `ROWS` rows."""
    num_tokens, num_heads, head_dim = query_THD.shape
    assert plan.rows == ROWS, plan.rows
    _attend[(plan.capacity(num_tokens) * num_kv_heads,)](
        query_THD,
        pages.keys,
        pages.values,
        page_table_SP,
        plan.tiles_N4,
        out_THD,
        scale * math.log2(math.e),
        page_table_SP.stride(0),
        pages.stride,
        **constants(num_heads, num_kv_heads, head_dim, page_size),
        num_warps=4,
        maxnreg=REGISTERS,
    )


def constants(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    shape = {"H": num_heads, "K": num_kv_heads, "D": head_dim, "PAGE": page_size}
    registers = {"COMPUTE_REGISTERS": COMPUTE_REGISTERS, "FETCH_REGISTERS": FETCH_REGISTERS}
    return {**shape, "KEYS": KEYS, "STAGES": STAGES, **registers}


@gluon.jit
def _attend(
    query_ptr,
    keys,
    values,
    page_table_ptr,
    tiles_ptr,
    out_ptr,
    factor,
    table_stride,
    page_stride,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
):
    """One tile of one key head; those of a tile are neighbours.

    Blocks of KEYS keys go through a ring of STAGES places. A place is full when its bulk load has arrived, and free
    when both computing groups have read it.
    """
    kv_head = gl.program_id(0) % K
    tile = tiles_ptr + (gl.program_id(0) // K) * 4
    table = page_table_ptr + gl.load(tile).to(gl.int64) * table_stride
    row = gl.load(tile + 1)
    position = gl.load(tile + 2)
    count = gl.load(tile + 3)
    if count > 0:
        key_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, KEYS, D], keys.layout)
        value_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, KEYS, D], keys.layout)
        full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(STAGES):
            mbarrier.init(full_keys.index(place), count=1)
            mbarrier.init(full_values.index(place), count=1)
            mbarrier.init(free_keys.index(place), count=2)
            mbarrier.init(free_values.index(place), count=2)
        rings = (key_ring, value_ring, full_keys, full_values, free_keys, free_values)
        sizes = (row, position, count, kv_head, factor)
        gl.warp_specialize(
            [
                (_compute, (query_ptr, out_ptr, rings, sizes, 0, H, K, D, KEYS, STAGES)),
                (_compute, (query_ptr, out_ptr, rings, sizes, 1, H, K, D, KEYS, STAGES)),
                (_fetch, (keys, values, rings, sizes, table, page_stride, D, PAGE, KEYS, STAGES)),
            ],
            [4, 1],
            [COMPUTE_REGISTERS, FETCH_REGISTERS],
        )


@gluon.jit
def _fetch(
    keys,
    values,
    rings,
    sizes,
    table,
    page_stride,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    key_ring, value_ring, full_keys, full_values, free_keys, free_values = rings
    _, position, count, kv_head, _ = sizes
    end = position + count
    for block in range((end + KEYS - 1) // KEYS):
        place = block % STAGES
        is_odd = (block // STAGES) & 1
        page = gl.load(table + block * KEYS // PAGE)
        row = page * page_stride + block * KEYS % PAGE
        mbarrier.wait(free_keys.index(place), is_odd ^ 1)
        mbarrier.expect(full_keys.index(place), KEYS * D * 2)
        tma.async_copy_global_to_shared(keys, [row, kv_head * D], full_keys.index(place), key_ring.index(place))
        mbarrier.wait(free_values.index(place), is_odd ^ 1)
        mbarrier.expect(full_values.index(place), KEYS * D * 2)
        tma.async_copy_global_to_shared(values, [row, kv_head * D], full_values.index(place), value_ring.index(place))


@gluon.jit
def _compute(
    query_ptr,
    out_ptr,
    rings,
    sizes,
    HALF: gl.constexpr,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """64 rows of the tile, each a query head of a token; rows left over do nothing that is kept."""
    GROUP: gl.constexpr = H // K
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    IN_MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key_ring, value_ring, full_keys, full_values, free_keys, _ = rings
    row, position, count, kv_head, factor = sizes
    end = position + count

    lane = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, IN_MEMORY))
    token = lane // GROUP
    cells = ((row + token).to(gl.int64) * H + kv_head * GROUP + lane % GROUP)[:, None] * D
    cells = cells + gl.arange(0, D, layout=gl.SliceLayout(0, IN_MEMORY))[None, :]
    is_used = (token < gl.minimum(count, 128 // GROUP))[:, None]
    query = gl.convert_layout(gl.load(query_ptr + cells, mask=is_used, other=0.0), gl.DotOperandLayout(0, SCORES, 2))
    tokens = (HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))) // GROUP
    positions = position + gl.minimum(tokens, count - 1)

    best = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    mixed = gl.zeros([64, D], gl.float32, MIXED)
    mbarrier.wait(full_keys.index(0), 0)
    scores = warpgroup_mma(
        query,
        key_ring.index(0).permute((1, 0)),
        gl.zeros([64, KEYS], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(free_keys.index(0), count=1)
    found, _, best, total = _softmax(scores, best, total, factor, 0, positions, KEYS, True)
    weights = gl.convert_layout(found.to(query.dtype), gl.DotOperandLayout(0, MIXED, 2))

    num_blocks = (end + KEYS - 1) // KEYS
    all_seen = gl.maximum((position + 1) // KEYS, 1)  # blocks before this one are seen by every row
    weights, mixed, best, total = _advance(
        query, rings, weights, mixed, best, total, positions, factor, 1, all_seen, KEYS, STAGES, False
    )
    weights, mixed, best, total = _advance(
        query, rings, weights, mixed, best, total, positions, factor, all_seen, num_blocks, KEYS, STAGES, True
    )

    place = (num_blocks - 1) % STAGES
    mbarrier.wait(full_values.index(place), ((num_blocks - 1) // STAGES) & 1)
    if end % KEYS != 0:
        # Values behind the end may be anything, and nothing times a NaN is one. Both groups write the same.
        key = (num_blocks - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, IN_MEMORY))
        written = gl.where((key < end)[:, None], value_ring.index(place).load(IN_MEMORY), 0.0)
        value_ring.index(place).store(written.to(query.dtype))
        fence_async_shared()
    mixing = warpgroup_mma(weights, value_ring.index(place), mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, deps=[mixing])
    mixed = mixed / gl.convert_layout(total, gl.SliceLayout(1, MIXED))[:, None]
    gl.store(out_ptr + cells, gl.convert_layout(mixed.to(query.dtype), IN_MEMORY), mask=is_used)


@gluon.jit
def _advance(
    query,
    rings,
    weights,
    mixed,
    best,
    total,
    positions,
    factor,
    begin,
    stop,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Blocks [begin, stop): the scores of each, and the values of the one before it, whose `weights` are at hand."""
    key_ring, value_ring, full_keys, full_values, free_keys, free_values = rings
    SCORES: gl.constexpr = positions.type.layout.parent
    MIXED: gl.constexpr = mixed.type.layout
    nothing = gl.zeros([64, KEYS], gl.float32, SCORES)
    for block in range(begin, stop):
        place = block % STAGES
        before = (block - 1) % STAGES
        mbarrier.wait(full_keys.index(place), (block // STAGES) & 1)
        scoring = warpgroup_mma(query, key_ring.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(full_values.index(before), ((block - 1) // STAGES) & 1)
        mixing = warpgroup_mma(weights, value_ring.index(before), mixed, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scoring])
        mbarrier.arrive(free_keys.index(place), count=1)
        found, shrink, best, total = _softmax(scores, best, total, factor, block * KEYS, positions, KEYS, MASKED)
        mixed = warpgroup_mma_wait(0, deps=[mixing])
        mbarrier.arrive(free_values.index(before), count=1)
        mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, MIXED))[:, None]
        weights = gl.convert_layout(found.to(query.dtype), gl.DotOperandLayout(0, MIXED, 2))
    return weights, mixed, best, total


@gluon.jit
def _softmax(scores, best, total, factor, first_key, positions, KEYS: gl.constexpr, MASKED: gl.constexpr):
    """The weights of a block in powers of two, by what they shrink all before them, and the new best and total."""
    SCORES: gl.constexpr = positions.type.layout.parent
    if MASKED:
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] <= positions[:, None], scores, -float("inf"))
    better = gl.maximum(best, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - better[:, None])
    shrink = gl.exp2(best - better)
    return weights, shrink, better, total * shrink + gl.sum(weights, 1)
