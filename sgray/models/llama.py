"""Llama: the common decoder itself, with biases where config.json asks for them."""

from __future__ import annotations

from sgray.models.family import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    qkv_bias=None,
    output_bias=None,
    mlp_bias=None,
)
