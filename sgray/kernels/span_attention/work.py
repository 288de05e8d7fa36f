"""The memory in which a step's tasks and their partial results lie, and how much of it a launch may need.

Knows the bounds that every planner keeps to, but neither how tasks are chosen nor how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TILE = 64
"""Keys in a tile. A span begins at a multiple of it, or of the page size where that is less."""

LOAD = 2
"""Parts that the planner aims at, for each multiprocessor, all heads together: they fit at once and keep all busy."""


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """What the planned part of a step may be at most, and the sizes of the model.

    `max_sequences` planned sequences of at most `max_length` keys, with at most `max_tokens` tokens together;
    `rows_per_task` (16, 32 or 64) query rows of one key-value head share a task. ValueError if those cannot hold
    the heads of one token, or if the page size is not a power of two of at least 16.

    **Bounds.** A task holds E = rows_per_task // (H / K) tokens. A sequence with l tokens and n tiles of keys is read
    by q = ceil(l / E) tasks a part; over B sequences and T tokens, sum(q) <= units = min(T, B + T // E). The planner
    takes c >= K * sum(n * q) / (2 * num_sms) tiles as the size of a part and cuts a sequence in
    s = max(1, round(n / c)) <= n / c + 1 parts. Hence

    - tasks: sum(s * q) <= sum(n * q) / c + sum(q) <= 2 * num_sms / K + units;
    - partial results: sum(s * l) <= sum(n * l) / c + T <= E * 2 * num_sms / K + T, as l <= E * q;
    - and neither is above ceil(max_length / 64) times units, or T, as s <= n.
    """

    max_sequences: int
    max_tokens: int
    max_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rows_per_task: int
    num_sms: int

    def __post_init__(self) -> None:
        group = self.num_heads // self.num_kv_heads
        if self.rows_per_task not in (16, 32, 64) or group > self.rows_per_task:
            raise ValueError(f"tasks of {self.rows_per_task} rows, for {group} query heads a key-value head")
        if self.page_size < 16 or self.page_size & (self.page_size - 1):
            raise ValueError(f"the page size must be a power of two of at least 16, not {self.page_size}")

    @property
    def tokens_per_task(self) -> int:
        """E: the tokens whose heads fit in a task."""
        return self.rows_per_task // (self.num_heads // self.num_kv_heads)

    @property
    def max_tasks(self) -> int:
        """Tasks of a step, for each key-value head."""
        units = min(self.max_tokens, self.max_sequences + self.max_tokens // self.tokens_per_task)
        return min(LOAD * self.num_sms // self.num_kv_heads + units, self._max_tiles * units)

    @property
    def max_partials(self) -> int:
        """Partial results of a step, for each query head."""
        splits = self.tokens_per_task * LOAD * self.num_sms // self.num_kv_heads
        return min(splits + self.max_tokens, self._max_tiles * self.max_tokens)

    @property
    def _max_tiles(self) -> int:
        return -(-self.max_length // TILE)


@dataclass(frozen=True, slots=True)
class SpanWork:
    """The tasks of a step and the room for what they compute.

    `tasks`: (task, 4) of slot, begin, end, number of entries. `entries`: (task, E, 3) of query row, that row's
    position, partial. `rows`: (row, 3) of query row, first partial, number of partials, which are neighbours. `counts`:
    number of tasks, number of rows. All int32. `partials`: (partial, H, D) results of single tasks; `sums`:
    (partial, H) base-2 logarithms of their sums of exponentials; both float32.
    """

    limits: SpanLimits
    tasks: Tensor
    entries: Tensor
    rows: Tensor
    counts: Tensor
    partials: Tensor
    sums: Tensor

    @classmethod
    def allocate(cls, limits: SpanLimits, device: torch.device) -> SpanWork:
        """Memory for everything within `limits`, without a task in it."""

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            limits=limits,
            tasks=integers(limits.max_tasks, 4),
            entries=integers(limits.max_tasks, limits.tokens_per_task, 3),
            rows=integers(limits.max_tokens, 3),
            counts=integers(2),
            partials=numbers(limits.max_partials, limits.num_heads, limits.head_dim),
            sums=numbers(limits.max_partials, limits.num_heads),
        )

    def for_capacity(self, max_sequences: int, max_tokens: int) -> SpanWork:
        """The same memory, for launches that provide for less."""
        limits = self.limits
        assert max_sequences <= limits.max_sequences and max_tokens <= limits.max_tokens, (max_sequences, max_tokens)
        return replace(self, limits=replace(limits, max_sequences=max_sequences, max_tokens=max_tokens))
