"""Every family against transformers: tiny random twins, in float32, at every position of 210 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from steps import Driver
from twins import edit_config, make_twin, reference_logprobs, some_tokens

# Two float32 programs that add in different orders, over three layers.
TOLERANCE = 2e-4

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": LONGROPE,
    "longrope-factor": {**LONGROPE, "factor": 4.0, "attention_factor": 1.3},
}


def assert_equal_to_transformers(directory: Path, length: int = 210, chunk: int = 1 << 20, **sections: dict) -> None:
    tokens = some_tokens(length)
    ours = Driver.load(directory, **sections).logprobs_everywhere(tokens, chunk)
    torch.testing.assert_close(ours, reference_logprobs(directory, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True])
def test_llama(tmp_path: Path, is_tied: bool) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "llama", tie_word_embeddings=is_tied))


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_llama_in_chunks(tmp_path: Path, chunk: int) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "llama"), 130, chunk)


def test_llama_whose_heads_are_not_a_share_of_the_hidden_size(tmp_path: Path) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "llama", head_dim=20))


@pytest.mark.parametrize("num_kv_heads", [1, 6])
def test_llama_with_one_or_all_key_value_heads(tmp_path: Path, num_kv_heads: int) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "llama", num_key_value_heads=num_kv_heads))


def test_all_seven_biases_of_llama_are_used_pub_122(tmp_path: Path) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "llama", attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize("attention_bias, mlp_bias", [(True, False), (False, True)])
def test_biases_of_one_block_alone_pub_122(tmp_path: Path, attention_bias: bool, mlp_bias: bool) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "llama", attention_bias=attention_bias, mlp_bias=mlp_bias))


@pytest.mark.parametrize("window", [None, 1, 5, 16, 64, 300])
@pytest.mark.parametrize("chunk", [1 << 20, 90, 1])
def test_mistral_sees_its_window_alone(tmp_path: Path, window: int | None, chunk: int) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "mistral", sliding_window=window), 150, chunk)


def test_qwen2(tmp_path: Path) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "qwen2"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [1 << 20, 50])
def test_a_window_on_late_layers(tmp_path: Path, family: str, chunk: int) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    assert_equal_to_transformers(make_twin(tmp_path, family, **changes), 150, chunk)


def test_a_window_that_config_json_leaves_to_its_rule(tmp_path: Path) -> None:
    make_twin(tmp_path, "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=2)
    assert_equal_to_transformers(edit_config(tmp_path, remove=("layer_types",)), 100)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_qwen3(tmp_path: Path, is_tied: bool, attention_bias: bool) -> None:
    changes = {"tie_word_embeddings": is_tied, "attention_bias": attention_bias, "head_dim": 16}
    assert_equal_to_transformers(make_twin(tmp_path, "qwen3", **changes))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_pub_123(tmp_path: Path, scaling: dict, kind_key: str, place: str) -> None:
    make_twin(tmp_path, "llama")
    values = {key: value for key, value in scaling.items() if key != "rope_type"}
    values[kind_key] = scaling["rope_type"]
    if place == "rope_parameters":
        edit_config(tmp_path, rope_parameters={**values, "rope_theta": 5000.0})
    else:
        edit_config(tmp_path, remove=("rope_parameters",), rope_scaling=values, rope_theta=5000.0)
    assert_equal_to_transformers(tmp_path)


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_rope_theta_is_read_from_either_place_pub_123(tmp_path: Path, place: str) -> None:
    make_twin(tmp_path, "llama")
    if place == "top":
        edit_config(tmp_path, remove=("rope_parameters",), rope_theta=777.0)
    else:
        edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    assert_equal_to_transformers(tmp_path, 100)


def test_longrope_uses_the_short_factors_where_only_short_contexts_are_served(tmp_path: Path) -> None:
    edit_config(make_twin(tmp_path, "llama"), rope_parameters={**LONGROPE, "rope_theta": 10000.0})
    assert_equal_to_transformers(tmp_path, 64, model={"context_length": 64})
