"""Tiny models with random weights, made and judged by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
VOCAB_SIZE = 101
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


# Of families with experts, whose names for the same numbers differ.
EXPERTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen2_moe": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
        "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    }
)


# Of a twin that is wide enough for a GPU's kernels and has scores that lie apart.
GPU_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
    }
)


def make_twin(directory: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model of the family into `directory`; every bias and norm is random as well."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[family](**{**SIZES, **EXPERTS.get(family, {}), **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Changes config.json as a user's editor would."""
    path = directory / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps({**values, **changes}))
    return directory


def edit_weights(directory: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """Replaces, adds or (None) removes tensors of a checkpoint of one file."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def reference_logprobs(directory: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' log-probabilities after every token, (tokens, vocabulary), in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def some_tokens(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Random ids that are no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()
