"""A checkpoint loads whole or not at all, and says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from steps import Driver
from twins import CONFIGS, EXPERTS, edit_config, edit_weights, make_twin, reference_logprobs, some_tokens

from sgray.errors import ModelLoadError
from sgray.layers.linear import Placement
from sgray.layers.quant.unquantized import Unquantized
from sgray.models.decoder import Decoder
from sgray.models.spec import ModelSpec
from sgray.parallel.mesh import Mesh

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def split_in_shards(directory: Path, count: int = 3) -> list[str]:
    """Cuts a checkpoint of one file into shards with an index; returns the files' names."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    weight_map = {name: files[place * count // len(names)] for place, name in enumerate(names)}
    for file in files:
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, directory / file, {"format": "pt"}
        )
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def assert_equal_to_transformers(directory: Path) -> None:
    tokens = some_tokens(40)
    ours = Driver.load(directory).logprobs_everywhere(tokens)
    torch.testing.assert_close(ours, reference_logprobs(directory, tokens), atol=2e-4, rtol=0)


def test_tied_embeddings_need_no_output_matrix_pub_119(tmp_path: Path) -> None:
    make_twin(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    assert_equal_to_transformers(tmp_path)


def test_a_copy_of_tied_embeddings_is_passed_over_pub_120(tmp_path: Path) -> None:
    make_twin(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, {"lm_head.weight": load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]})
    assert_equal_to_transformers(tmp_path)


def test_an_untied_output_matrix_is_used_pub_120(tmp_path: Path) -> None:
    assert_equal_to_transformers(make_twin(tmp_path, tie_word_embeddings=False))


def test_a_missing_output_matrix_is_named_pub_120(tmp_path: Path) -> None:
    edit_weights(make_twin(tmp_path, tie_word_embeddings=False), {"lm_head.weight": None})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        Driver.load(tmp_path)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    split_in_shards(make_twin(tmp_path))
    assert_equal_to_transformers(tmp_path)


def test_a_deleted_shard_is_named_pub_121(tmp_path: Path) -> None:
    files = split_in_shards(make_twin(tmp_path))
    (tmp_path / files[1]).unlink()
    with pytest.raises(ModelLoadError, match=files[1]):
        Driver.load(tmp_path)


def test_a_tensor_that_its_shard_does_not_hold_is_named_pub_121(tmp_path: Path) -> None:
    files = split_in_shards(make_twin(tmp_path))
    tensors = load_file(tmp_path / files[1])
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / files[1])
    with pytest.raises(ModelLoadError, match=lost.replace(".", r"\.")):
        Driver.load(tmp_path)


@pytest.mark.parametrize("share", [0.5, 0.0, 0.999])
def test_a_shard_cut_short_is_named_pub_121(tmp_path: Path, share: float) -> None:
    files = split_in_shards(make_twin(tmp_path))
    whole = (tmp_path / files[1]).read_bytes()
    (tmp_path / files[1]).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError, match=files[1]):
        Driver.load(tmp_path)


def test_a_tensor_that_the_index_forgot_is_named(tmp_path: Path) -> None:
    split_in_shards(make_twin(tmp_path))
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["model.layers.1.self_attn.k_proj.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        Driver.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x"}}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    split_in_shards(make_twin(tmp_path))
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelLoadError, match=INDEX):
        Driver.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight"],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    edit_weights(make_twin(tmp_path), {name: None})
    with pytest.raises(ModelLoadError, match=f"lacks {name}"):
        Driver.load(tmp_path)


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_a_missing_bias_is_named(tmp_path: Path, part: str) -> None:
    make_twin(tmp_path, attention_bias=True, mlp_bias=True)
    name = f"model.layers.1.{part}.bias"
    edit_weights(tmp_path, {name: None})
    with pytest.raises(ModelLoadError, match=name):
        Driver.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "model.extra.weight", "extra"]
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    edit_weights(make_twin(tmp_path), {name: torch.ones(48)})
    with pytest.raises(ModelLoadError, match=f"no place for {name}"):
        Driver.load(tmp_path)


def test_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    edit_weights(make_twin(tmp_path), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    Driver.load(tmp_path)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    edit_weights(make_twin(tmp_path), {"model.layers.0.mlp.up_proj.weight": torch.ones(41, 48)})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: shape \[41, 48\].*\[40, 48\]"):
        Driver.load(tmp_path)


def test_a_directory_without_weights_says_what_it_should_hold(tmp_path: Path) -> None:
    (make_twin(tmp_path) / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=WEIGHTS):
        Driver.load(tmp_path)


def test_half_precision_weights_are_converted(tmp_path: Path) -> None:
    make_twin(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    edit_weights(tmp_path, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert_equal_to_transformers(edit_config(tmp_path, dtype="bfloat16"))


@pytest.mark.parametrize("tp_size", [2])
@pytest.mark.parametrize(
    "family, has_whole_experts",
    [*((family, False) for family in CONFIGS), *((family, True) for family in EXPERTS)],
)
def test_the_ranks_parts_are_cut_from_the_files_as_from_whole_tensors(
    tmp_path: Path, family: str, tp_size: int, has_whole_experts: bool
) -> None:
    make_twin(tmp_path, family)
    whole = load_file(tmp_path / "model.safetensors")
    spec, device = ModelSpec.read(tmp_path), torch.device("cpu")
    if has_whole_experts:
        spec = spec.with_whole_experts(tp_size)
    mapping = spec.mapping()
    for rank in range(tp_size):
        placement = Placement(Mesh(rank, tp_size), torch.float32, device)
        read, filled = (
            dict(Decoder(spec, placement, Unquantized()).parameters()),
            Decoder(spec, placement, Unquantized()),
        )
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            for name, tensor in whole.items():
                target = mapping.target(name)
                assert target is not None
                read[target.name].fill(target.piece, file.get_slice(name))
                dict(filled.parameters())[target.name].fill(target.piece, tensor)
        for name, parameter in filled.parameters():
            assert parameter.missing() == []
            assert torch.equal(read[name].data, parameter.data), name
