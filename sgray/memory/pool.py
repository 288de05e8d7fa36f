"""The tensor behind page ids. Knows neither sequences nor who holds a page.

Layout (page, layer, key/value, token, head, dimension): a page is one contiguous block over all layers, so that moving
one elsewhere is a single copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgray.config import MemoryConfig
from sgray.errors import ConfigError

# On a CPU the memory belongs to everybody, other replicas included: the pool takes at most a quarter of what is free,
# and not more than this unless `max_total_tokens` says so.
CPU_SHARE = 0.25
CPU_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Everything about a pool but the number of its pages."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """`pages` has shape (page, layer, 2, token, head, dimension); `rows` is the same, a row a token and side;
    `layers[i]` are layer i's keys and values, each (page, token, head, dimension).
    """

    def __init__(self, num_pages: int, shape: PoolShape, device: torch.device) -> None:
        dims = (num_pages, shape.num_layers, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, because unwritten tokens are read under a mask and a NaN would come through it.
        self.pages = torch.zeros(dims, dtype=shape.dtype, device=device)
        self.layers = [(side[0], side[1]) for side in self.pages.permute(1, 2, 0, 3, 4, 5)]
        self.rows = self.pages.view(-1, shape.num_kv_heads * shape.head_dim)
        self.shape = shape

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole pages, (source, destination) each, in order."""
        for source, destination in copies:
            self.pages[destination].copy_(self.pages[source])

    def clear_pages(self, pages: list[int]) -> None:
        """Zeroes pages that start to be filled, so that no token of an earlier owner is left in them."""
        for page in pages:
            self.pages[page].zero_()


def plan_num_pages(
    memory: MemoryConfig, shape: PoolShape, *, free_bytes: int, is_cpu: bool, num_sharing: int = 1
) -> int:
    """How many pages the pool gets; `free_bytes` is what the device has left once the weights are loaded.

    `num_sharing`: so many pools are made of that, and one page on the CPU is a page of each.

    Raises ConfigError when not even one page fits.
    """
    if memory.max_total_tokens is not None:
        num_pages = memory.max_total_tokens // shape.page_size
        if num_pages < 1:
            raise ConfigError(
                f"memory.max_total_tokens {memory.max_total_tokens} is less than one page of {shape.page_size} tokens"
            )
        return num_pages
    budget = free_bytes * memory.mem_fraction_static
    if is_cpu:
        budget = min(budget, free_bytes * CPU_SHARE, CPU_MAX_BYTES) / num_sharing
    if budget < shape.page_bytes:
        raise ConfigError(
            f"no memory for key-value pages: {free_bytes} bytes are free after loading the weights and one page needs "
            f"{shape.page_bytes}; free some memory, use a smaller model or set memory.max_total_tokens"
        )
    return int(budget // shape.page_bytes)
