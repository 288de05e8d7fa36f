"""A GGUF file of a Llama-family model, rewritten as an ordinary Hugging Face directory.

Knows the two formats and nothing of downloads, caches or torch. Weights are dequantised with the `gguf` library (of the
llama.cpp project) and written as bfloat16, the type in which such models are published: the rounding (2^-9) is far
below the error of 4-bit quantisation, the file is half as large as float32, and a run in float32 and a run in bfloat16
hold the very same numbers. One tensor at a time is in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sgray.errors import ModelLoadError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
WEIGHTS_FILE = "model.safetensors"

Progress = Callable[[int, int], None]

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REQUIRED_FIELDS = (
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
)
_HEADS_KEY = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def convert(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """Write the model of the GGUF file `source` into the existing directory `target`.

    `progress` is called after each tensor with the bytes of weights written so far and their sum.
    Raises ModelLoadError for a file that is not GGUF or of an architecture, tokenizer or tensor not known here.
    """
    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _refuse_unknown(source, fields)
    names = {tensor.name: _hugging_face_name(source, tensor.name) for tensor in reader.tensors}
    _write_json(target / CONFIG_FILE, _config(fields, set(names.values()), _vocab_size(reader)))
    _write_json(target / GENERATION_FILE, _special_ids(fields))
    _write_json(target / TOKENIZER_CONFIG_FILE, _tokenizer_config(fields))
    tokenizer = _tokenizer(fields)
    tokenizer.save(str(target / TOKENIZER_FILE))
    _write_weights(target / WEIGHTS_FILE, reader, names, fields, progress or (lambda done, total: None))


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ModelLoadError(f"{source} is not a readable GGUF file: {error}") from error


def _refuse_unknown(source: Path, fields: dict[str, Any]) -> None:
    """Only what is known to be translated without loss passes; the architecture is named first."""
    known = {
        "general.architecture": ("llama",),
        "llama.rope.scaling.type": ("none",),
        "llama.expert_count": (0,),
        "tokenizer.ggml.model": ("gpt2",),
        "tokenizer.ggml.pre": ("smollm",),
        "tokenizer.ggml.add_bos_token": (False,),
        "tokenizer.ggml.add_eos_token": (False,),
        "tokenizer.ggml.add_space_prefix": (False,),
    }
    required = {"general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"}
    for key, allowed in known.items():
        value = fields.get(key)
        if value not in allowed and (key in required or value is not None):
            raise ModelLoadError(
                f"{source}: cannot convert a GGUF file with {key} = {value!r}; "
                f"supported: {', '.join(map(repr, allowed))}. Use the model's original Hugging Face directory instead"
            )
    if missing := [key for key in _REQUIRED_FIELDS if key not in fields]:
        raise ModelLoadError(f"{source}: cannot convert a GGUF file that lacks {', '.join(missing)}")


def _hugging_face_name(source: Path, name: str) -> str:
    """The checkpoint name of one GGUF tensor, as `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := re.fullmatch(r"(\w+)\.weight", name)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.weight"
    raise ModelLoadError(f"{source}: cannot convert the tensor {name!r}; it belongs to no supported architecture")


def _vocab_size(reader: gguf.GGUFReader) -> int:
    return next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """The ids of bos, eos and pad, under the names that Hugging Face gives them."""
    pairs = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{short}_token_id" for name, short in pairs.items()}
    return {name: int(fields[key]) for name, key in keys.items() if key in fields}


def _config(fields: dict[str, Any], names: set[str], vocab_size: int) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in names,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "vocab_size": vocab_size,
        "torch_dtype": "bfloat16",
        **_special_ids(fields),
    }


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """SmolLM's byte-level byte-pair encoding: every digit stands alone, no blank is put in front."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf.TokenType
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind in (types.CONTROL, types.USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == types.CONTROL, normalized=False)])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    keys = {name: f"tokenizer.ggml.{short}_token_id" for name, short in named.items()}
    template = {"chat_template": fields["tokenizer.chat_template"]} if "tokenizer.chat_template" in fields else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        **{name: tokens[fields[key]] for name, key in keys.items() if key in fields},
        **template,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    path: Path, reader: gguf.GGUFReader, names: dict[str, str], fields: dict[str, Any], progress: Progress
) -> None:
    """A safetensors file: the length of its header, the header as JSON, then the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        start, end = end, end + _size_bytes(tensor)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[names[tensor.name]] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in reader.tensors:
            file.write(gguf.quantize(_values(tensor, fields), gguf.GGMLQuantizationType.BF16).tobytes())
            progress(file.tell() - len(raw) - 8, end)
        file.flush()
        os.fsync(file.fileno())


def _size_bytes(tensor: gguf.gguf_reader.ReaderTensor) -> int:
    return int(tensor.n_elements) * 2


def _values(tensor: gguf.gguf_reader.ReaderTensor, fields: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The float32 values of one tensor, rows in the order that Hugging Face's rotary embedding wants."""
    values: npt.NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if part not in _HEADS_KEY:
        return values
    num_heads = int(fields.get(f"llama.{_HEADS_KEY[part]}", fields["llama.attention.head_count"]))
    return _halves_apart(values, num_heads)


def _halves_apart(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from llama.cpp's pairs side by side (x0 y0 x1 y1 ..) to halves apart (x0 x1 .. y0 y1 ..)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
