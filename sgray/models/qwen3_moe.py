"""Qwen3 with experts: Qwen3 whose layers are mixtures, all but some; a window that is switched on is for all layers."""

from __future__ import annotations

from sgray.models.family import DECODER_RULES, ExpertKeys, Family, expert_rules

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    qkv_bias=None,
    output_bias=None,
    qk_norm=True,
    has_window=True,
    window_switch="use_sliding_window",
    experts=ExpertKeys(),
    rules=DECODER_RULES + expert_rules("model.layers.{layer}.mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)
