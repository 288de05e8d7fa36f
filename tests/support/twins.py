"""Tiny models with random weights, made and judged by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
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
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**{**SIZES, **changes}), dtype=torch.float32)
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
