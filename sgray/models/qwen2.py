"""Qwen2, Qwen2.5: Llama with biases on query, key and value alone, and a window on late layers if switched on."""

from __future__ import annotations

from sgray.models.family import Family

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=True,
    has_window=True,
    window_switch="use_sliding_window",
    window_layers="late",
)
