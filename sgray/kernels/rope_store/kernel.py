"""Rotation and storing in Triton. Knows nothing of how positions and locations came about.

A program takes one row's next 16 heads, as two tiles of first and second halves: for most models the heads of a row
divide by 16, a thread loads whole 16-byte vectors, and one row's programs are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEADS = 16
VALUES_PER_THREAD = 8  # of each half: 16 bytes in the half-precision types


def rope_store(
    qkv_TX: Tensor,
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    locations_T: Tensor,
    rotation_PD: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    query_norm_D: Tensor | None = None,
    key_norm_D: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """See the package's docstring."""
    num_rows, head_dim = query_THD.shape[0], query_THD.shape[2]
    has_norm = query_norm_D is not None
    blocks = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)
    _rope_store[(num_rows * blocks,)](
        qkv_TX,
        query_THD,
        keys,
        values,
        positions_T,
        locations_T,
        rotation_PD,
        query_norm_D if has_norm else rotation_PD,
        key_norm_D if has_norm else rotation_PD,
        eps,
        qkv_TX.stride(0),
        keys.stride(0),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        PAGE=keys.shape[1],
        BLOCKS=blocks,
        HEADS=HEADS,
        HAS_NORM=has_norm,
        PDL=pdl,
        num_warps=warps(head_dim),
        **({"launch_pdl": True} if pdl else {}),
    )


def warps(head_dim: int) -> int:
    """As many as give each thread one vector of either half."""
    return min(max(HEADS * head_dim // 2 // VALUES_PER_THREAD // 32, 1), 8)


@triton.jit(do_not_specialize=["eps"])
def _rope_store(
    qkv_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    locations_ptr,
    rotation_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    qkv_stride,
    page_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0) // BLOCKS
    head = (tl.program_id(0) % BLOCKS) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_query = head < H
    is_key = (head >= H) & (head < H + K)
    is_value = (head >= H + K) & (head < H + 2 * K)
    location = tl.load(locations_ptr + row)
    # Garbage where the row is padding: no address may be made of it.
    position = tl.where(location >= 0, tl.load(positions_ptr + row), 0)
    angles = rotation_ptr + position.to(tl.int64) * D + column
    cos = tl.load(angles)
    sin = tl.load(angles + HALF)
    if PDL:
        # Padding waits too: a kernel that ends early without waiting would let its successor overtake its predecessor.
        gdc_wait()
    if location < 0:
        return
    source = qkv_ptr + row.to(tl.int64) * qkv_stride + head * D + column
    a = tl.load(source, mask=head < H + 2 * K, other=0.0)
    b = tl.load(source + HALF, mask=head < H + 2 * K, other=0.0)
    if PDL:
        gdc_launch_dependents()
    x = a.to(tl.float32)
    y = b.to(tl.float32)
    if HAS_NORM:
        # Both are short and stay in the caches: a select costs less than a second pass over the heads.
        first = tl.where(is_query, tl.load(query_norm_ptr + column), tl.load(key_norm_ptr + column))
        second = tl.where(is_query, tl.load(query_norm_ptr + HALF + column), tl.load(key_norm_ptr + HALF + column))
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        x = x * scale * first
        y = y * scale * second
    low = (x * cos - y * sin).to(query_ptr.dtype.element_ty)
    high = (y * cos + x * sin).to(query_ptr.dtype.element_ty)
    query = query_ptr + row.to(tl.int64) * (H * D) + head * D + column
    tl.store(query, low, mask=is_query)
    tl.store(query + HALF, high, mask=is_query)
    place = (location // PAGE).to(tl.int64) * page_stride + (location % PAGE) * (K * D) + column
    key = keys_ptr + place + (head - H) * D
    tl.store(key, low, mask=is_key)
    tl.store(key + HALF, high, mask=is_key)
    value = values_ptr + place + (head - H - K) * D
    tl.store(value, a, mask=is_value)
    tl.store(value + HALF, b, mask=is_value)
