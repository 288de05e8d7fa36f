"""CUDA graphs of whole steps, by their size. Launching a step's kernels one by one takes the host longer than a small
step takes the device; a graph is one launch.

Knows nothing of models: it is given a function that launches a step of a size, and everything it launches reads its
numbers from device memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgray.layers.backends.kernel_attention import StepSize

# Decode batches: every size that is common, then steps of about an eighth, so that little is computed for nothing.
DECODES = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
)
MIN_SHARED = 4  # sequences of the smallest decode for which a prefix that is read once has a graph
# Steps with prompts in them, as (tokens, sequences): short extends, and the chunks that run beside decodes. Above 200
# tokens products cost by whole tiles of rows: on an H200, 256 take 9 % less than 264, and 512 less than 448.
MIXED = (
    (16, 16),
    (64, 32),
    (128, 32),
    (200, 8),
    (224, 32),
    (256, 72),
    (320, 136),
    (384, 200),
    (512, 328),
    (704, 520),
)


class StepGraphs:
    """Captures steps, the largest first, all in one pool of memory. What a launch returns is lost."""

    def __init__(self, launch: Callable[[StepSize], object], sizes: list[StepSize]) -> None:
        self._launch = launch
        self._sizes = sorted(sizes, key=lambda size: (size.num_tokens, size.num_sequences))
        self._graphs: dict[StepSize, torch.cuda.CUDAGraph] = {}

    def capture_all(self) -> None:
        """Captures every size. Each is launched once before, so that nothing is compiled or loaded during capture."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size)

    def fitting(self, num_sequences: int, num_tokens: int, *, is_decode: bool, is_shared: bool) -> StepSize | None:
        """The smallest captured size that holds such a step; one with prompts may share what it reads in any case."""
        for size in self._sizes:
            if (
                size.num_tokens >= num_tokens
                and size.num_sequences >= num_sequences
                and size.is_decode == is_decode
                and (size.is_shared == is_shared or not is_decode)
            ):
                return size if size in self._graphs else None
        return None

    def replay(self, size: StepSize) -> None:
        """Queues the step of that size."""
        self._graphs[size].replay()

    def _capture(self, size: StepSize) -> torch.cuda.CUDAGraph:
        self._launch(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        # Only this thread's calls matter: others of the process may go on allocating meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._launch(size)
        return graph


def graph_sizes(max_sequences: int, max_tokens: int, max_short: int, *, has_shared: bool) -> list[StepSize]:
    """The sizes worth capturing for decodes of up to `max_sequences` and steps of up to `max_tokens`."""
    decodes = [*(count for count in DECODES if count < max_sequences), max_sequences]
    shared = [count for count in decodes if count >= MIN_SHARED] if has_shared else []
    mixed = [(tokens, min(count, max_sequences)) for tokens, count in MIXED if tokens <= max_tokens]
    return [
        *(StepSize(count, count, max_short=1, num_short=count, num_long=0, longest=0) for count in decodes),
        *(StepSize(count, count, 1, count, 0, longest=0, is_shared=True) for count in shared),
        *(
            StepSize(count, tokens, max_short, min(tokens, count * max_short), tokens, longest=0, is_shared=True)
            for tokens, count in mixed
        ),
    ]
