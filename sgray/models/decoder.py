"""The one decoder that every family shares: embedding, layers of attention and feed-forward, norm, output head.

Knows nothing of sequences, pages or ranks. Hidden states are flat, (T tokens, hidden), whatever sequences they are of.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sgray.layers.attention import Attention, AttentionShape, AttentionStep
from sgray.layers.compute import Compute
from sgray.layers.embedding import Embedding
from sgray.layers.head import OutputHead
from sgray.layers.linear import Linear, LinearMethod, Placement
from sgray.layers.mlp import GatedMLP
from sgray.layers.moe import Experts, Router, SparseMLP
from sgray.layers.norm import QueryKeyNorm, RMSNorm
from sgray.layers.parameter import Parameter
from sgray.layers.residual import Residual
from sgray.layers.rope import Rope
from sgray.models.spec import ModelSpec

Part = Embedding | Linear | RMSNorm | QueryKeyNorm | OutputHead | Router | Experts


class DecoderLayer:
    """x += attention(norm(x)), then the same with the feed-forward block."""

    def __init__(
        self, spec: ModelSpec, layer: int, placement: Placement, method: LinearMethod, compute: Compute
    ) -> None:
        shape = AttentionShape(
            hidden_size=spec.hidden_size,
            head_dim=spec.head_dim,
            query_heads=spec.query_rule,
            kv_heads=spec.kv_rule,
            qkv_bias=spec.qkv_bias,
            output_bias=spec.output_bias,
            qk_norm_eps=spec.rms_norm_eps if spec.family.qk_norm else None,
        )
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.attention = Attention(layer, shape, placement, method)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.mlp: GatedMLP | SparseMLP
        if spec.sparsity is not None and spec.sparsity.layers[layer]:
            self.mlp = SparseMLP(spec.hidden_size, spec.sparsity, placement, method, compute.experts)
        else:
            self.mlp = GatedMLP(
                spec.hidden_size, spec.intermediate_size, spec.mlp_rule, placement, method, bias=spec.mlp_bias
            )

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Everything with parameters, by name."""
        yield "attention_norm", self.attention_norm
        yield "attention.qkv", self.attention.qkv
        if self.attention.qk_norm is not None:
            yield "attention.qk_norm", self.attention.qk_norm
        yield "attention.output", self.attention.output
        yield "mlp_norm", self.mlp_norm
        for name, part in self.mlp.parts():
            yield f"mlp.{name}", part

    def __call__(self, x: Residual, step: AttentionStep, rows_R: Tensor | None = None) -> Residual:
        """The sum with this layer's part; of the rows `rows_R` alone where these are given."""
        qkv_TX = x.project(self.attention_norm, self.attention.qkv)
        mixed_RX = step.mix(self.attention, qkv_TX, rows_R)
        x = x if rows_R is None else x.take(rows_R)
        x.add(self.attention.output, mixed_RX)
        self.mlp.add_to(x, self.mlp_norm)
        return x


class Decoder:
    """Built empty; the loader fills `parameters()` and calls `finish()`."""

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        method: LinearMethod,
        compute: Compute | None = None,
    ) -> None:
        compute = compute or Compute()
        self.spec = spec
        self._residual = compute.residual
        self.rope = Rope(spec.head_dim, spec.rope, placement.dtype, placement.device)
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, placement)
        self.layers = [DecoderLayer(spec, layer, placement, method, compute) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, placement)
        self.head = OutputHead(
            self.embedding, spec.vocab_size, spec.hidden_size, placement, compute.product, tied=spec.is_tied
        )

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every tensor that the checkpoint must fill, by our name."""
        for prefix, part in self._parts():
            for name, parameter in part.parameters():
                yield f"{prefix}.{name}", parameter

    def finish(self) -> None:
        """Call once, when every parameter is filled."""
        for _, part in self._parts():
            if isinstance(part, Linear | QueryKeyNorm | OutputHead | Router | Experts):
                part.finish()

    def run(self, tokens_T: Tensor, step: AttentionStep, rows_R: Tensor | None = None) -> Residual:
        """The sum after the last layer, before the last norm: of all tokens, or of the rows `rows_R` alone, each the
        last of its sequence.

        For the others the last layer then ends with their keys and values, and most of its work is saved: of a prompt
        of thousands of tokens only the last one's scores are asked for.
        """
        x = self._residual(self.embedding(tokens_T))
        for layer in self.layers[:-1]:
            layer(x, step)
        return self.layers[-1](x, step, rows_R)

    def logits(self, hidden: Residual, room_RV: Tensor | None = None) -> Tensor:
        """Float32 scores over the vocabulary for rows of what `run` gave; in `room_RV` if that is of use."""
        return hidden.scores(self.norm, self.head, room_RV)

    def _parts(self) -> Iterator[tuple[str, Part]]:
        yield "embedding", self.embedding
        for number, layer in enumerate(self.layers):
            for name, part in layer.parts():
                yield f"layers.{number}.{name}", part
        yield "norm", self.norm
        yield "head", self.head
