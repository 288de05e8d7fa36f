"""Families with experts against transformers: random twins in float32, whatever else is in the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from steps import GREEDY, Driver
from transformers import AutoModelForCausalLM
from twins import EXPERTS, edit_config, edit_weights, make_twin, reference_logprobs, some_tokens

from sgray.errors import ModelLoadError
from sgray.models.spec import ModelSpec


def assert_equal_to_transformers(directory: Path, length: int, chunk: int = 1 << 20) -> None:
    tokens = some_tokens(length)
    ours = Driver.load(directory).logprobs_everywhere(tokens, chunk)
    torch.testing.assert_close(ours, reference_logprobs(directory, tokens), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("chunk", [1 << 20, 1, 7, 64])
def test_every_family_whole_and_in_chunks(tmp_path: Path, family: str, chunk: int) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, family), 130, chunk)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("is_renormalized", [False, True])
def test_weights_are_renormalised_where_config_json_says_so(tmp_path: Path, family: str, is_renormalized: bool) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, family, norm_topk_prob=is_renormalized), 60)


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 1}, {"num_experts_per_tok": 8}, {"num_local_experts": 3}])
def test_one_expert_all_experts_and_an_odd_number(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, "mixtral", **changes), 60)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "changes, sparse",
    [
        ({"mlp_only_layers": [1]}, (True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, (False, False, False)),
        ({"mlp_only_layers": [2, 7]}, (True, True, False)),
    ],
)
def test_layers_without_experts_between_those_with(
    tmp_path: Path, family: str, changes: dict[str, Any], sparse: tuple[bool, ...]
) -> None:
    make_twin(tmp_path, family, **changes)
    sparsity = ModelSpec.read(tmp_path).sparsity
    assert sparsity is not None and sparsity.layers == sparse
    assert_equal_to_transformers(tmp_path, 60)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("mixtral", {"sliding_window": 20}),
        ("qwen3_moe", {"sliding_window": 20, "use_sliding_window": True}),
        ("qwen2_moe", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 2}),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 20, 50])
def test_windows(tmp_path: Path, family: str, changes: dict[str, Any], chunk: int) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, family, **changes), 100, chunk)


def test_a_window_whose_layers_are_not_listed_is_refused(tmp_path: Path) -> None:
    make_twin(tmp_path, "qwen2_moe", sliding_window=20, use_sliding_window=True)
    with pytest.raises(ModelLoadError, match="layer_types"):
        ModelSpec.read(edit_config(tmp_path, remove=("layer_types",)))


def test_noise_of_training_is_no_matter(tmp_path: Path) -> None:
    make_twin(tmp_path, "mixtral", router_jitter_noise=0.5, output_router_logits=True, router_aux_loss_coef=0.3)
    assert_equal_to_transformers(tmp_path, 40)


@pytest.mark.parametrize("family", EXPERTS)
def test_the_number_of_experts_may_have_either_name(tmp_path: Path, family: str) -> None:
    make_twin(tmp_path, family)
    values = json.loads((tmp_path / "config.json").read_text())
    [name] = {"num_experts", "num_local_experts"} & set(values)
    found = ModelSpec.read(tmp_path).sparsity
    assert found is not None
    if family != "mixtral":
        other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[name]
        edit_config(tmp_path, remove=(name,), **{other: values[name]})
        assert ModelSpec.read(tmp_path).sparsity == found


@torch.inference_mode()
@pytest.mark.parametrize("family", EXPERTS)
def test_greedy_tokens_are_those_of_transformers_in_company_as_alone(tmp_path: Path, family: str) -> None:
    make_twin(tmp_path, family)
    driver = Driver.load(tmp_path)
    together = [driver.start(some_tokens(5 + 9 * number, number), GREEDY) for number in range(5)]
    driver.generate(together, 12, 16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for number, sequence in enumerate(together):
        best = model(torch.tensor([sequence.tokens[:-1]])).logits[0].argmax(-1)
        assert sequence.output == best[sequence.num_prompt - 1 :].tolist()
        alone = driver.start(some_tokens(5 + 9 * number, number), GREEDY)
        driver.generate([alone], 12)
        assert alone.output == sequence.output


@pytest.mark.parametrize("family", EXPERTS)
def test_a_missing_expert_is_named(tmp_path: Path, family: str) -> None:
    make_twin(tmp_path, family)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if ".1." in name and ".experts.5." in name)
    edit_weights(tmp_path, {name: None})
    with pytest.raises(ModelLoadError, match=f"lacks {name}"):
        Driver.load(tmp_path)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    make_twin(tmp_path, "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.8.w1.weight"
    edit_weights(tmp_path, {name: torch.ones(40, 48)})
    with pytest.raises(ModelLoadError, match=f"no place for {name}"):
        Driver.load(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"moe_intermediate_size": "24"}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [1.5]}, "mlp_only_layers"),
        ({"mlp_only_layers": 1}, "mlp_only_layers"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_twin(tmp_path, "qwen3_moe")
    with pytest.raises(ModelLoadError, match=message):
        ModelSpec.read(edit_config(tmp_path, **changes))
