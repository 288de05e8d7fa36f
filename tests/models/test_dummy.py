"""Random weights fill a model whole, repeat, and give scores that mean nothing but are numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from steps import Driver
from twins import SIZES, some_tokens

from sgray.layers.linear import Placement
from sgray.layers.quant.unquantized import Unquantized
from sgray.models.decoder import Decoder
from sgray.models.dummy import STD, fill_dummy
from sgray.models.hub import resolve_model
from sgray.models.spec import ModelSpec
from sgray.parallel.mesh import Mesh

ARCHITECTURES = [
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def write_config(directory: Path, architecture: str) -> Path:
    """A model directory with nothing but config.json in it."""
    values = {**SIZES, **EXPERTS, "architectures": [architecture], "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def build(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    return Decoder(ModelSpec.read(directory), Placement(Mesh(), dtype, torch.device("cpu")), Unquantized())


def filled(directory: Path, seed: int = 0) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """A model, and its weights as they were drawn."""
    decoder = build(directory)
    weights = {name: parameter.data for name, parameter in decoder.parameters()}
    for data in weights.values():
        data.fill_(torch.nan)
    fill_dummy(decoder, seed)
    return decoder, weights


def test_a_directory_with_config_json_alone_is_a_model_directory(tmp_path: Path) -> None:
    assert resolve_model(str(write_config(tmp_path, "LlamaForCausalLM"))) == tmp_path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_filled_norms_around_one_and_the_rest_around_zero(tmp_path: Path, architecture: str) -> None:
    _, weights = filled(write_config(tmp_path, architecture))
    for name, data in weights.items():
        middle = 1.0 if "norm" in name else 0.0
        values = data.float()
        assert values.isfinite().all(), name
        assert abs(values.mean().item() - middle) < STD, name
        assert 0.5 * STD < values.std().item() < 1.5 * STD, name


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaForCausalLM")
    first, again, other = (filled(tmp_path, seed)[1] for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_no_two_layers_have_the_same_weights(tmp_path: Path) -> None:
    _, weights = filled(write_config(tmp_path, "LlamaForCausalLM"))
    assert not torch.equal(weights["layers.0.mlp.down.weight"], weights["layers.1.mlp.down.weight"])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_scores_are_finite_and_differ(tmp_path: Path, architecture: str) -> None:
    write_config(tmp_path, architecture)
    driver = Driver.load(tmp_path, model={"load_format": "dummy"})
    logprobs = driver.logprobs_everywhere(some_tokens(40))
    assert logprobs.isfinite().all()
    assert len(logprobs.argmax(dim=-1).unique()) > 4
    assert logprobs.std(dim=-1).min() > 0.01
