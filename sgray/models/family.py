"""What a model file declares: how one architecture differs from the common decoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sgray.models.mapping import Drop, Fuse, Rename, Rule, Stack

DECODER_RULES: tuple[Rule, ...] = (
    Rename("model.embed_tokens", "embedding"),
    Rename("model.layers.{layer}.input_layernorm", "layers.{layer}.attention_norm"),
    Fuse(
        (
            "model.layers.{layer}.self_attn.q_proj",
            "model.layers.{layer}.self_attn.k_proj",
            "model.layers.{layer}.self_attn.v_proj",
        ),
        "layers.{layer}.attention.qkv",
    ),
    Rename("model.layers.{layer}.self_attn.q_norm", "layers.{layer}.attention.qk_norm.query"),
    Rename("model.layers.{layer}.self_attn.k_norm", "layers.{layer}.attention.qk_norm.key"),
    Rename("model.layers.{layer}.self_attn.o_proj", "layers.{layer}.attention.output"),
    Rename("model.layers.{layer}.post_attention_layernorm", "layers.{layer}.mlp_norm"),
    Fuse(("model.layers.{layer}.mlp.gate_proj", "model.layers.{layer}.mlp.up_proj"), "layers.{layer}.mlp.gate_up"),
    Rename("model.layers.{layer}.mlp.down_proj", "layers.{layer}.mlp.down"),
    Rename("model.norm", "norm"),
    Rename("lm_head", "head"),
    Drop("model.layers.{layer}.self_attn.rotary_emb.inv_freq"),
)


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The names of a router and its experts in the module `block` of a layer."""
    experts = f"{block}.experts.{{expert}}"
    return (
        Rename(f"{block}.gate", "layers.{layer}.mlp.router"),
        Stack((f"{experts}.{gate}", f"{experts}.{up}"), "layers.{layer}.mlp.experts.gate_up"),
        Stack((f"{experts}.{down}",), "layers.{layer}.mlp.experts.down"),
    )


@dataclass(frozen=True)
class ExpertKeys:
    """Where config.json says what a layer's experts are like.

    `counts` are names for their number, of which the first that is there counts. Without `shared_size` there is no
    expert that every token goes through. `is_renormalized`: the weights of a token's experts always sum up to one; else
    `norm_topk_prob` decides.
    """

    counts: tuple[str, ...] = ("num_local_experts", "num_experts")
    inner_size: str = "moe_intermediate_size"
    shared_size: str | None = None
    is_renormalized: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture of `config.json`.

    `defaults` are the values of keys that config.json may leave out. The three flags of biases and windows say what
    config.json alone does not: None for a bias means that `attention_bias` or `mlp_bias` decides. `window_switch` names
    the key that turns `sliding_window` on; without one a window that is set is used. It is for all layers, or for those
    that `layer_types` names: where that is left out, for `late` those from `max_window_layers` on, while `listed` needs
    it. With `experts`, feed-forward blocks are mixtures of them.
    """

    architecture: str
    defaults: Mapping[str, Any]
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    has_window: bool = False
    window_switch: str | None = None
    window_layers: Literal["all", "late", "listed"] = "all"
    experts: ExpertKeys | None = None
    rules: tuple[Rule, ...] = field(default=DECODER_RULES)
