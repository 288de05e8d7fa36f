"""What the kernels of a decode step would take if nothing but their bytes or operations cost time. Arithmetic alone.

A product reads its weight, or its arithmetic takes longer; attention reads every key and value that is in some page
once; everything else moves the activations. The limit of a group is the sum of those of its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GROUPS: Mapping[str, str] = {
    "products": r"^(_row|_tile|nvjet|sm90_|cutlass|.*gemm|.*splitK)",
    "attention": r"^(_attend|_merge|_plan)",
    "norm, gate, rotation": r"^(_add_rms_norm|_silu_mul|_rope_store)",
    "sampling": r"^(_survey|_decide|_sample|_filter|_record)",
}
REST = "the rest"


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode of `batch` sequences that read `num_keys` different positions; the model's shapes."""

    batch: int
    num_keys: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv(self) -> int:
        """Outputs of the first product of a layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def group_of(kernel: str) -> str:
    """The group to which a kernel belongs by its name."""
    return next((name for name, pattern in GROUPS.items() if re.match(pattern, kernel)), REST)


def limits_us(step: DecodeStep, read_gb_s: float, matmul_tflop_s: float) -> dict[str, float]:
    """Microseconds by group, with weights, keys and activations of two bytes and sums of four."""

    def read_us(num_bytes: float) -> float:
        return num_bytes / read_gb_s / 1e3

    def product_us(outputs: int, inputs: int) -> float:
        operations = 2 * step.batch * outputs * inputs
        return max(read_us(2 * outputs * inputs), operations / matmul_tflop_s / 1e6)

    out = step.num_heads * step.head_dim
    layer = [(step.qkv, step.hidden), (step.hidden, out), (2 * step.inner, step.hidden), (step.hidden, step.inner)]
    norm = step.hidden * (4 + 4 + 2 + 2)  # the sum in and out, what is added, the result
    gate = step.inner * 2 * 3
    rotation = 2 * (step.qkv + step.qkv)
    return {
        "products": step.num_layers * sum(product_us(*size) for size in layer) + product_us(step.vocab, step.hidden),
        "attention": step.num_layers * read_us(step.num_keys * 2 * 2 * step.num_kv_heads * step.head_dim),
        "norm, gate, rotation": read_us(step.batch * (step.num_layers * (2 * norm + gate + rotation) + norm)),
        "sampling": read_us(step.batch * step.vocab * 4),
        REST: 0.0,
    }
