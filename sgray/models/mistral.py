"""Mistral: Llama without biases, every layer looking back over a sliding window if one is set."""

from __future__ import annotations

from sgray.models.family import Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    has_window=True,
)
