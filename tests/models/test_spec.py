"""What is read from a model directory, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgray.config import Config
from sgray.errors import ConfigError, ModelLoadError
from sgray.models.spec import ModelSpec, served_spec

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def read(tmp_path: Path, generation: Any = None, remove: tuple[str, ...] = (), **changes: Any) -> ModelSpec:
    values = {key: value for key, value in {**SMOLLM2, **changes}.items() if key not in remove}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelSpec.read(tmp_path)


def test_a_plain_llama(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers) == (9, 3, 64, 30)
    assert (spec.vocab_size, spec.context_length, spec.rms_norm_eps) == (49152, 8192, 1e-5)
    assert spec.is_tied and not spec.qkv_bias and not spec.output_bias and not spec.mlp_bias
    assert spec.rope.theta == 100000 and spec.rope.kind == "default"
    assert spec.windows == (None,) * 30


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (2, None, (2,)),
        (2, {}, (2,)),
        ([2, 5], {"eos_token_id": 7}, (2, 5, 7)),
        (2, {"eos_token_id": [2, 0]}, (0, 2)),
        (None, {"eos_token_id": [9]}, (9,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_ids_are_those_of_both_files(tmp_path: Path, config: Any, generation: Any, expected: tuple) -> None:
    assert read(tmp_path, generation, eos_token_id=config).end_ids == expected


def test_a_missing_config_json_is_named_pub_124(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelSpec.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "\ufeff{}x"])
def test_a_broken_config_json_is_named_pub_124(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelSpec.read(tmp_path)


@pytest.mark.parametrize("names", [["FooForCausalLM"], ["FooForCausalLM", "LlamaForCausalLM"]])
def test_an_unknown_architecture_is_named_with_what_is_supported_pub_124(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ModelLoadError, match=r"FooForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        read(tmp_path, architectures=names)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM"])
def test_no_architecture_is_said_pub_124(tmp_path: Path, names: Any) -> None:
    with pytest.raises(ModelLoadError, match="architecture"):
        read(tmp_path, architectures=names)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh", 3, None])
def test_an_unknown_activation_is_named(tmp_path: Path, activation: Any) -> None:
    with pytest.raises(ModelLoadError, match=str(activation)):
        read(tmp_path, hidden_act=activation)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["foo", "su", "proportional", "mrope"])
def test_an_unknown_rope_type_is_named_pub_123(tmp_path: Path, place: str, key: str, kind: str) -> None:
    with pytest.raises(ModelLoadError, match=kind):
        read(tmp_path, **{place: {key: kind, "factor": 2}})


@pytest.mark.parametrize(
    "rope, missing",
    [
        ({"type": "linear"}, "factor"),
        ({"type": "yarn"}, "factor"),
        ({"type": "llama3", "factor": 8, "low_freq_factor": 1}, "high_freq_factor"),
        ({"type": "longrope", "short_factor": [1.0]}, "long_factor"),
    ],
)
def test_a_missing_number_of_a_rope_type_is_named_pub_123(tmp_path: Path, rope: dict, missing: str) -> None:
    with pytest.raises(ModelLoadError, match=f"rope_scaling: {missing} is missing"):
        read(tmp_path, rope_scaling=rope)


def test_partly_rotated_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="partial_rotary_factor"):
        read(tmp_path, partial_rotary_factor=0.5)


def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="awq"):
        read(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_required_field_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        read(tmp_path, remove=(name,))


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_size", "576"),
        ("hidden_size", True),
        ("num_attention_heads", 0),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 2),
        ("num_key_value_heads", -3),
        ("head_dim", 7),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("rope_scaling", "linear"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=field):
        read(tmp_path, **{field: value})


def test_null_counts_as_absent(tmp_path: Path) -> None:
    spec = read(tmp_path, num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None)
    assert (spec.num_kv_heads, spec.head_dim) == (9, 64)


@pytest.mark.parametrize(
    "changes, expected",
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)],
)
def test_the_window_of_mistral(tmp_path: Path, changes: dict, expected: int | None) -> None:
    assert read(tmp_path, architectures=["MistralForCausalLM"], **changes).windows == (expected,) * 30


def test_a_window_of_qwen2_needs_its_switch(tmp_path: Path) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 28}
    assert read(tmp_path, **qwen2).windows == (None,) * 30
    assert read(tmp_path, **qwen2, use_sliding_window=True).windows == (None,) * 28 + (64,) * 2
    kinds = ["sliding_attention"] + ["full_attention"] * 29
    assert read(tmp_path, **qwen2, use_sliding_window=True, layer_types=kinds).windows == (64,) + (None,) * 29


def test_the_context_of_scaled_models(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2}).context_length == 16384
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8192}
    assert read(tmp_path, rope_scaling=yarn).context_length == 32768
    assert read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2}).context_length == 8192


@pytest.mark.parametrize("tp_size", [0, 2, 4])
def test_ranks_that_cannot_share_the_heads_are_refused_pub_125(tmp_path: Path, tp_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tp_size {tp_size} .*9 query heads.*Sizes that fit: 1, 3"):
        read(tmp_path).check_parallel(tp_size)


def test_three_ranks_share_the_model_evenly_pub_125(tmp_path: Path) -> None:
    read(tmp_path).check_parallel(3)


def test_nine_ranks_are_refused_for_the_mlp_pub_125(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1536 MLP columns cannot be shared evenly by 9 ranks") as error:
        read(tmp_path).check_parallel(9)
    assert "heads" not in str(error.value).split("Sizes")[0]


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def test_ranks_that_cannot_share_an_experts_columns_are_refused(tmp_path: Path) -> None:
    spec = read(tmp_path, **MIXTURE)
    spec.check_parallel(4)
    with pytest.raises(ConfigError, match="64 columns of an expert cannot be shared evenly by 3 ranks"):
        spec.check_parallel(3)
    spec.with_whole_experts(3).check_parallel(3)


def test_dense_columns_count_only_where_there_are_dense_layers(tmp_path: Path) -> None:
    read(tmp_path, **MIXTURE, intermediate_size=7).check_parallel(2)
    with pytest.raises(ConfigError, match="7 MLP columns"):
        read(tmp_path, **MIXTURE, intermediate_size=7, mlp_only_layers=[3]).check_parallel(2)


def test_columns_of_a_shared_expert_count_with_whole_experts_too(tmp_path: Path) -> None:
    shared = {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 63}
    spec = read(tmp_path, **{**MIXTURE, **shared})
    with pytest.raises(ConfigError, match="63 columns of the shared expert"):
        spec.with_whole_experts(2).check_parallel(2)


def test_experts_that_ranks_cannot_share_evenly_are_refused_by_name(tmp_path: Path) -> None:
    read(tmp_path, **MIXTURE)
    config = Config.parse({"parallel": {"tp_size": 4, "ep_size": 4}})
    with pytest.raises(ConfigError, match="ep_size 4 does not fit this model: 6 experts") as error:
        served_spec(tmp_path, config)
    assert error.value.param == "ep_size"


def test_a_model_without_experts_has_none_to_share_out(tmp_path: Path) -> None:
    read(tmp_path)
    with pytest.raises(ConfigError, match=r"ep_size 3 .*LlamaForCausalLM has none"):
        served_spec(tmp_path, Config.parse({"parallel": {"tp_size": 3, "ep_size": 3}}))
