"""The memory in which a step's tasks and their partial results lie, and how much of it a launch may need.

Knows the bounds that every planner keeps to, but neither how tasks are chosen nor how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TILE = 64
"""Keys in a tile. A span begins at a multiple of it, or of the page size where that is less."""

RESIDENT = 2
"""Programs at once on a multiprocessor whose memory holds that many. Measured on an H200: a third gains nothing, and
then shares are smaller by a third, so that more rows are cut."""

SHARED_BYTES = 227 * 1024  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """What the planned part of a step may be at most, and the sizes of the model.

    `max_sequences` planned sequences of at most `max_length` keys, with at most `max_tokens` tokens together;
    `rows_per_task` (16, 32 or 64) query rows of one key-value head share a task. ValueError if those cannot hold
    the heads of one token, or if the page size is not a power of two of at least 16. `max_shared` bounds how often
    tokens read shared units (`SharedTables`), each token counted once a unit; 0 if the planner is not to look at them.

    **Bounds.** A task holds E = rows_per_task // (H / K) tokens. A unit is what one task would be if nothing were cut:
    up to E tokens of a sequence, and the tiles of keys they read. B sequences with T tokens make at most
    units = min(T, B + T // E) of them. Laid end to end, their n tiles are cut at every multiple of
    c >= n / num_bins, so in fewer than num_bins places; a unit that has m bins to itself is cut in m - 1. Hence

    - tasks: every unit begins one, every cut inside of a unit one more, so fewer than units + num_bins;
    - rows to merge: those of units with a cut, so at most min(T, E * num_bins);
    - partial results: a unit with x > 0 cuts has x + 1 <= 2 * x parts, so at most 2 * E * num_bins.

    Shared units are units like any other, at most `max_shared`. A token that reads d > 0 of them has d + 1 <= 2 * d
    parts beside its cuts, so there are `max_shared` rows to merge and 2 * `max_shared` partial results more.
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
    max_shared: int = 0

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
    def num_bins(self) -> int:
        """Shares that the tiles of a step are dealt out in, for each key-value head: all are computed at once."""
        fitting = SHARED_BYTES // self.program_bytes(depth=2)
        programs = min(RESIDENT, fitting) * self.num_sms // self.num_kv_heads
        return max(min(programs, self._max_own * -(-self.max_length // TILE)), 1)

    @property
    def max_tasks(self) -> int:
        """Tasks of a step, for each key-value head."""
        return self._max_own + self.max_shared + self.num_bins

    @property
    def max_merged(self) -> int:
        """Rows of a step that more than one task reads for."""
        return min(self.max_tokens, self.tokens_per_task * self.num_bins + self.max_shared)

    @property
    def max_partials(self) -> int:
        """Partial results of a step, for each query head."""
        return 2 * (self.tokens_per_task * self.num_bins + self.max_shared)

    @property
    def _max_own(self) -> int:
        return min(self.max_tokens, self.max_sequences + self.max_tokens // self.tokens_per_task)

    def program_bytes(self, depth: int) -> int:
        """Shared memory of a program with `depth` tiles of keys and values, of two bytes a number, in flight."""
        width = 1 << (self.head_dim - 1).bit_length()
        return 2 * width * (depth * 2 * TILE + self.rows_per_task) + 4 * 1024


@dataclass(frozen=True, slots=True)
class SpanWork:
    """The tasks of a step and the room for what they compute.

    `bins`: the first task of each bin and, last, the number of tasks; a bin's tasks are neighbours. `tasks`: (task, 4)
    of slot, begin, end, number of entries. `entries`: (task, E, 3) of query row, that row's position, partial, which is
    -1 where the task is the row's only one. `rows`: (row, 3) of query row, first partial, number of partials, which are
    neighbours; rows with one task are not listed. `num_rows_1`: how many are. `parts`: (shared unit, 2) of first task,
    number of tasks, for the planner alone. All int32. `partials`: (partial, H, D) results of single tasks; `sums`:
    (partial, H) base-2 logarithms of their sums of exponentials; both float32.
    """

    limits: SpanLimits
    bins: Tensor
    tasks: Tensor
    entries: Tensor
    rows: Tensor
    num_rows_1: Tensor
    parts: Tensor
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
            bins=integers(limits.num_bins + 1),
            tasks=integers(limits.max_tasks, 4),
            entries=integers(limits.max_tasks, limits.tokens_per_task, 3),
            rows=integers(limits.max_merged, 3),
            num_rows_1=integers(1),
            parts=integers(max(limits.max_shared, 1), 2),
            partials=numbers(limits.max_partials, limits.num_heads, limits.head_dim),
            sums=numbers(limits.max_partials, limits.num_heads),
        )

    def for_capacity(self, max_sequences: int, max_tokens: int) -> SpanWork:
        """The same memory, for launches that provide for less."""
        limits = self.limits
        assert max_sequences <= limits.max_sequences and max_tokens <= limits.max_tokens, (max_sequences, max_tokens)
        return replace(self, limits=replace(limits, max_sequences=max_sequences, max_tokens=max_tokens))
