"""What all kernel measurements share: the sizes to measure, the stopwatch, and arithmetic on bytes. Knows no kernel."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sgray.bench.stopwatch import Call, Stopwatch
from sgray.errors import EngineError

L2_BYTES = 60e6
MOST_SETS = 32
LARGEST_ERROR = 0.03  # of the largest value: bfloat16 keeps 1 in 256, sums in another order a few of those

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix product of the model: a weight (outputs, inputs)."""

    name: str
    outputs: int
    inputs: int
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's shapes and the cases to measure on them. Lengths in tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    page_size: int
    decode: tuple[tuple[str, tuple[int, ...]], ...]
    shared: tuple[tuple[str, int, int, int, int], ...]  # name, groups, sequences of a group, shared tokens, own tokens
    extend: tuple[tuple[str, int, int, int], ...]  # name, sequences, tokens before, new tokens
    extend_shared: tuple[tuple[str, int, int, int], ...]  # the same, where the tokens before are those of all
    tokens: tuple[int, ...]
    few_rows: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    read_values: int
    read_programs: tuple[int, ...]
    matmul: int

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def weights(self) -> tuple[Weight, ...]:
        """A layer's four products and the output head's."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (
            Weight("qkv", qkv, self.hidden),
            Weight("output", self.hidden, self.num_heads * self.head_dim),
            Weight("gate_up", 2 * self.inner, self.hidden, is_gated=True),
            Weight("down", self.hidden, self.inner),
            Weight("head", self.vocab, self.hidden),
        )


def full_sizes() -> Sizes:
    """Llama-3.1-8B."""
    uniform = [(1, 1024), (1, 4096), (1, 32768), (16, 1024), (16, 4096), (64, 1024), (64, 4096), (256, 1024)]
    decode = [(f"{count} x {length}", (length,) * count) for count, length in uniform]
    decode.append(("64 ragged, mean 4096", ragged_lengths(64, 4096, 8.0)))
    cold = [(f"{2**14 // length} x {length}", 2**14 // length, 0, length) for length in (1024, 2048, 4096, 8192, 16384)]
    groups = [(1, 256, 8192, 256), (8, 32, 8192, 256), (32, 16, 4096, 192), (1, 64, 4096, 1024), (1, 16, 8192, 1024)]
    groups += [(1, 8, 2048, 256), (1, 4, 2048, 256), (16, 4, 1024, 1024), (1, 64, 256, 2048)]
    shared = [
        (f"{count} x {size} over {prefix} + {own}", count, size, prefix, own) for count, size, prefix, own in groups
    ]
    cached = [(f"{count} x 512 after 16384", count, 16384, 512) for count in (1, 8)]
    return Sizes(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden=4096,
        inner=14336,
        vocab=128256,
        page_size=64,
        decode=tuple(decode),
        shared=tuple(shared),
        extend=(*cold, *cached),
        extend_shared=tuple((f"32 x {new} after 8192", 32, 8192, new) for new in (17, 32, 64, 128)),
        tokens=(1, 64, 8192),
        few_rows=(1, 2, 8, 16, 32, 64),
        sampled_rows=(1, 64, 256),
        read_values=2**30,
        read_programs=(2048, 8192, 16384, 32768, 65536),
        matmul=8192,
    )


def ragged_lengths(count: int, mean: int, max_over_mean: float) -> tuple[int, ...]:
    """Log-normal lengths by quantiles (so always the same), with this mean and this longest one, in a mixed order."""
    quantiles = [math.exp(NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
    longest = round(mean * max_over_mean)
    rest = (count * mean - longest) / sum(quantiles[:-1])
    lengths = [max(1, round(value * rest)) for value in quantiles[:-1]] + [longest]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class Rig:
    """Where and how to measure. `read_gb_s` is the ceiling that shares of bandwidth are taken of."""

    device: torch.device
    sizes: Sizes
    stopwatch: Stopwatch
    pdl: bool = False
    read_gb_s: float = math.nan

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values, made on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_()

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """NaN everywhere."""
        return torch.full(shape, math.nan, dtype=dtype, device=self.device)

    def integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """An int32 tensor."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def sets(self, make: Callable[[], Any], set_bytes: float) -> list[Any]:
        """So many buffers, from `make`, that calls in turn find nothing of them in the L2 cache."""
        return [make() for _ in range(num_sets(set_bytes))]

    def share(self, num_bytes: float, us: float) -> float:
        """Percent of the read ceiling at which `num_bytes` were moved in `us` microseconds."""
        return 100 * num_bytes / (us * 1e-6) / (self.read_gb_s * 1e9)

    def microseconds_if_possible(self, calls: Sequence[Call]) -> float | None:
        """Time of somebody else's kernel; None where it does not serve these shapes or this device."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns for each reason that speaks against a kernel
            try:
                return self.stopwatch.microseconds(calls)
            except RuntimeError:
                return None

    def sdpa(self, backend: SDPBackend, calls: Sequence[Call]) -> float | None:
        """Time of torch's attention with one of its kernels."""
        with sdpa_kernel(backend):
            return self.microseconds_if_possible(calls)


def num_sets(set_bytes: float) -> int:
    """Three times the L2 cache, at least two sets; small ones may fit in the cache, as they do in a model."""
    return min(MOST_SETS, max(2, math.ceil(3 * L2_BYTES / max(1.0, set_bytes))))


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value. Raises EngineError above LARGEST_ERROR, and for NaN."""
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    error = float(difference)
    if not error <= LARGEST_ERROR:
        raise EngineError(f"the result is wrong: it differs by {error:.3g} of the largest value")
    return error
