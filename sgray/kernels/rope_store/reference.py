"""Rotation and storing in plain torch. Knows nothing of GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """See the package's docstring; `pdl` means nothing here."""
    used = (locations_T >= 0).nonzero().flatten()
    heads = qkv_TX[used].unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rotation_PD[positions_T[used].long(), None].chunk(2, dim=-1)
    pages, tokens = (locations_T[used] // keys.shape[1]).long(), (locations_T[used] % keys.shape[1]).long()
    query_THD[used] = _rotate(_normalise(query, query_norm_D, eps), cos, sin).to(query_THD.dtype)
    keys[pages, tokens] = _rotate(_normalise(key, key_norm_D, eps), cos, sin).to(keys.dtype)
    values[pages, tokens] = value


def _normalise(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    heads = heads.float()
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = heads.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
