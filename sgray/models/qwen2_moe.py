"""Qwen1.5 and Qwen2 with experts: Qwen2 whose layers are mixtures, all but some, with one expert for every token."""

from __future__ import annotations

from sgray.models.family import DECODER_RULES, ExpertKeys, Family, expert_rules
from sgray.models.mapping import Fuse, Rename

SHARED = "model.layers.{layer}.mlp.shared_expert"

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
    },
    qkv_bias=True,
    has_window=True,
    window_switch="use_sliding_window",
    window_layers="listed",
    experts=ExpertKeys(shared_size="shared_expert_intermediate_size"),
    rules=(
        *DECODER_RULES,
        *expert_rules("model.layers.{layer}.mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        Fuse((f"{SHARED}.gate_proj", f"{SHARED}.up_proj"), "layers.{layer}.mlp.shared.gate_up"),
        Rename(f"{SHARED}.down_proj", "layers.{layer}.mlp.shared.down"),
        Rename(f"{SHARED}_gate", "layers.{layer}.mlp.shared_gate"),
    ),
)
