"""Mixtral: Mistral with a mixture of experts in every layer, of which the chosen ones' weights sum up to one."""

from __future__ import annotations

from sgray.models.family import DECODER_RULES, ExpertKeys, Family, expert_rules

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    has_window=True,
    experts=ExpertKeys(counts=("num_local_experts",), inner_size="intermediate_size", is_renormalized=True),
    rules=DECODER_RULES + expert_rules("model.layers.{layer}.block_sparse_moe", gate="w1", up="w3", down="w2"),
)
