from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sgray.errors import ModelLoadError
from sgray.models import gguf

TOKENS = ["<|end|>", "<|start|>", *map(chr, range(33, 127)), "Ġ", "ab", "Ġab"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def llama(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """A tiny Llama with biases whose random weights bfloat16 holds exactly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        attention_bias=True,
        tie_word_embeddings=request.param,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter).bfloat16().float() * 0.25
    return model


def permuted(name: str, values: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """llama.cpp's own order of rows in q and k, as its converter writes them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{NAMES['.'.join(parts[2:-1])]}.{parts[-1]}"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]] + ".weight"


def fields(config: LlamaConfig) -> dict[str, Any]:
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(path: Path, values: dict[str, Any], tensors: dict[str, np.ndarray], architecture: str = "llama") -> Path:
    writer = library.GGUFWriter(path, architecture)
    for key, value in values.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {gguf_name(name): permuted(name, value, model.config) for name, value in state.items()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "converted"
    path.mkdir()
    return path


def test_a_converted_model_computes_the_same_as_its_original(
    llama: LlamaForCausalLM, tmp_path: Path, target: Path
) -> None:
    gguf.convert(write(tmp_path / "tiny.gguf", fields(llama.config), tensors(llama)), target)
    converted = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 2, 77, 3, 50, 5, 9]])
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, llama(ids).logits, rtol=0, atol=0)


def test_a_converted_tokenizer_loads_with_its_template(llama: LlamaForCausalLM, tmp_path: Path, target: Path) -> None:
    gguf.convert(write(tmp_path / "tiny.gguf", fields(llama.config), tensors(llama)), target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("x ab12<|end|>ab"))
    assert pieces == ["x", "Ġab", "1", "2", "<|end|>", "ab"]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|start|>")
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<|start|>a<|end|>"


def test_progress_counts_every_byte_of_the_weights(llama: LlamaForCausalLM, tmp_path: Path, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = write(tmp_path / "tiny.gguf", fields(llama.config), tensors(llama))
    gguf.convert(source, target, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (2 * sum(tensor.size for tensor in tensors(llama).values()),) * 2


def test_the_default_models_configuration_is_the_published_one(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    published = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in published} == published
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_default_model_knows_the_capital_of_france(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(answer[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre = 'qwen2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, target: Path, change: dict[str, Any], message: str
) -> None:
    values = {key: value for key, value in (fields(LlamaConfig()) | change).items() if value is not None}
    with pytest.raises(ModelLoadError, match=message):
        gguf.convert(write(tmp_path / "x.gguf", values, {"output_norm.weight": np.ones(4, np.float32)}), target)
    assert list(target.iterdir()) == []


def test_another_architecture_is_refused_by_name(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "x.gguf", {}, {"output_norm.weight": np.ones(4, np.float32)}, architecture="falcon")
    with pytest.raises(ModelLoadError, match=r"general\.architecture = 'falcon'.*supported: 'llama'"):
        gguf.convert(source, target)


def test_an_unknown_tensor_is_refused_by_name(llama: LlamaForCausalLM, tmp_path: Path, target: Path) -> None:
    extra = tensors(llama) | {"rope_freqs.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        gguf.convert(write(tmp_path / "x.gguf", fields(llama.config), extra), target)


@pytest.mark.parametrize("kept", [0, 3, 4, 200, -100], ids=str)
def test_a_damaged_file_is_refused(llama: LlamaForCausalLM, tmp_path: Path, target: Path, kept: int) -> None:
    source = write(tmp_path / "x.gguf", fields(llama.config), tensors(llama))
    source.write_bytes(source.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        gguf.convert(source, target)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(64))
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        gguf.convert(source, target)
