"""Qwen3: Qwen2 with normalised queries and keys instead of biases, and a head size of its own."""

from __future__ import annotations

from sgray.models.family import Family

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=None,
    output_bias=None,
    qk_norm=True,
    has_window=True,
    window_switch="use_sliding_window",
    window_layers="late",
)
