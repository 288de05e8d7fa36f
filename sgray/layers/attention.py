"""Self-attention over paged key-value memory, and what a layer is told of the step.

Shape letters: T tokens of the step, H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sgray.layers.linear import Linear, LinearMethod, Output, Placement
from sgray.layers.norm import QueryKeyNorm
from sgray.layers.rope import rotate
from sgray.parallel.mesh import Split, Whole

KeysValues = tuple[Tensor, Tensor]
"""One layer's keys and values, each of shape (page, token, K, D)."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: `length` tokens from flat row `row` on, after `start` tokens in `pages`.

    `pages` covers the `start + length` tokens.
    """

    row: int
    start: int
    length: int
    pages: list[int]


class StepAttention(Protocol):
    """The attention of one step, planned before the first layer."""

    def attend(self, layer: int, query_THD: Tensor) -> Tensor:
        """The mixture of values, (T, H, D), for queries whose keys and values are already in the pages."""
        ...


class AttentionBackend(Protocol):
    """Plans the attention of a step over the key-value memory of every layer."""

    def plan(self, layers: Sequence[KeysValues], spans: list[Span]) -> StepAttention: ...


class AttentionStep(Protocol):
    """What the attention layers of a step share."""

    def mix(self, attention: Attention, qkv_TX: Tensor, rows_R: Tensor | None = None) -> Tensor:
        """From a layer's product of queries, keys and values to the mixture of values, (T, H * D).

        Normalises and rotates queries and keys where the layer asks for it, keeps keys and values in the pages. With
        `rows_R`, each the last row of its sequence, (R, H * D): the mixture of those alone.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step in plain torch.

    `rows` is the key-value memory as rows of K * D numbers; `key_rows[layer]` and `value_rows[layer]` say which of them
    take the step's T keys and values. `rotation` is the pair for `rotate`.
    """

    rotation: tuple[Tensor, Tensor]
    rows: Tensor
    key_rows: tuple[Tensor, ...]
    value_rows: tuple[Tensor, ...]
    attention: StepAttention

    def mix(self, attention: Attention, qkv_TX: Tensor, rows_R: Tensor | None = None) -> Tensor:
        num_tokens, num_rotated = qkv_TX.shape[0], attention.num_heads + attention.num_kv_heads
        qkv = qkv_TX.view(num_tokens, -1, attention.head_dim)
        rotated = qkv[:, :num_rotated]
        if attention.qk_norm is not None:
            rotated = attention.qk_norm(rotated)
        rotated = rotate(rotated, *self.rotation)
        key = rotated[:, attention.num_heads :].flatten(1)
        value = qkv[:, num_rotated:].flatten(1)
        self.rows.index_copy_(0, self.key_rows[attention.layer], key)
        self.rows.index_copy_(0, self.value_rows[attention.layer], value)
        mixed = self.attention.attend(attention.layer, rotated[:, : attention.num_heads]).view(num_tokens, -1)
        return mixed if rows_R is None else mixed.index_select(0, rows_R)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes, biases and rules of an attention layer, before any cutting."""

    hidden_size: int
    head_dim: int
    query_heads: Split
    kv_heads: Split
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None  # None: no query and key normalisation


class Attention:
    """The parameters of softmax(q k^T / sqrt(D)) v with rotary positions; one product gives query, key and value."""

    def __init__(self, layer: int, shape: AttentionShape, placement: Placement, method: LinearMethod) -> None:
        query = Output(shape.query_heads.units * shape.head_dim, shape.query_heads)
        kv = Output(shape.kv_heads.units * shape.head_dim, shape.kv_heads)
        self.qkv = Linear(shape.hidden_size, [query, kv, kv], placement, method, bias=shape.qkv_bias)
        self.output = Linear(
            query.features,
            [Output(shape.hidden_size, Whole())],
            placement,
            method,
            bias=shape.output_bias,
            input_rule=shape.query_heads.of_inputs(),
        )
        self.layer = layer
        self.head_dim = shape.head_dim
        self.num_heads = shape.query_heads.held(placement.mesh)
        self.num_kv_heads = shape.kv_heads.held(placement.mesh)
        self.qk_norm: QueryKeyNorm | None = None
        if shape.qk_norm_eps is not None:
            counts = (self.num_heads, self.num_kv_heads)
            self.qk_norm = QueryKeyNorm(*counts, shape.head_dim, shape.qk_norm_eps, placement)
