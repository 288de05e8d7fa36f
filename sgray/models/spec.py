"""What a model directory says about its model; the one place that reads config.json and generation_config.json.

One line a field, each with its type and whether it is required. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgray.config import Config
from sgray.errors import ConfigError, ModelLoadError
from sgray.layers.scaling import RopeScaling
from sgray.layers.sparsity import Sparsity
from sgray.models.family import Family
from sgray.models.mapping import Mapping as NameMapping
from sgray.models.registry import find_family
from sgray.parallel.mesh import ShardRule, Split, check_rules

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape. `windows[layer]` is how many tokens that layer sees back, itself included; None for all.

    `sparsity` says what the experts are like, of a model that has any, and which layers have them.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    is_tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    rope: RopeScaling
    end_ids: tuple[int, ...]
    sparsity: Sparsity | None = None

    @classmethod
    def read(cls, model_dir: Path) -> ModelSpec:
        """What `model_dir` holds; raises ModelLoadError that names what is missing or not supported."""
        fields = Fields.load(model_dir / "config.json")
        family = find_family(fields.get("architectures"))
        fields = fields.with_defaults(family.defaults)
        _refuse_unsupported(fields)
        num_heads = fields.count("num_attention_heads")
        num_layers = fields.count("num_hidden_layers")
        hidden_size = fields.count("hidden_size")
        attention_bias = fields.boolean("attention_bias", False)
        rope = _read_rope(fields)
        head_dim = fields.count("head_dim", hidden_size // num_heads)
        spec = cls(
            family=family,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            context_length=rope.length,
            rms_norm_eps=fields.number("rms_norm_eps"),
            is_tied=fields.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=fields.boolean("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            windows=_read_windows(fields, family, num_layers),
            rope=rope,
            end_ids=_read_end_ids(fields, model_dir),
            sparsity=_read_sparsity(fields, family, num_layers),
        )
        spec._check(fields)
        return spec

    @property
    def query_rule(self) -> Split:
        """How query heads are shared by ranks."""
        return Split(self.num_heads, "query heads")

    @property
    def kv_rule(self) -> Split:
        """How key-value heads are shared by ranks."""
        return Split(self.num_kv_heads, "key-value heads", shared=True)

    @property
    def mlp_rule(self) -> Split:
        """How the inner columns of a feed-forward block without experts are shared by ranks."""
        return Split(self.intermediate_size, "MLP columns")

    def mapping(self) -> NameMapping:
        """The family's rules for weights, spelled out for this model."""
        return NameMapping(self.family.rules, self.num_layers, self.sparsity.num_experts if self.sparsity else 0)

    def check_parallel(self, tp_size: int) -> None:
        """Raises ConfigError with the counts and the sizes that fit, where `tp_size` ranks cannot share the model."""
        rules: list[ShardRule] = [self.query_rule, self.kv_rule]
        if self.sparsity is None or not all(self.sparsity.layers):
            rules.append(self.mlp_rule)
        if self.sparsity is not None:
            rules += self.sparsity.rules
        check_rules(rules, tp_size)

    def with_whole_experts(self, ep_size: int) -> ModelSpec:
        """The same model with whole experts on each of `ep_size` ranks; raises ConfigError where that cannot be."""
        if self.sparsity is None:
            raise ConfigError(
                f"parallel.ep_size {ep_size} shares out experts, of which {self.family.architecture} has none; "
                "leave it at 1",
                param="ep_size",
            )
        if problem := self.sparsity.experts.problem(ep_size):
            raise ConfigError(
                f"parallel.ep_size {ep_size} does not fit this model: {problem}. With ep_size 1 the ranks share each "
                "expert's columns",
                param="ep_size",
            )
        return replace(self, sparsity=replace(self.sparsity, has_whole_experts=True))

    def with_context_length(self, context_length: int) -> ModelSpec:
        """The same model serving shorter contexts."""
        return replace(self, context_length=context_length, rope=replace(self.rope, length=context_length))

    def _check(self, fields: Fields) -> None:
        if self.num_heads % self.num_kv_heads:
            raise fields.error(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise fields.error(f"head_dim {self.head_dim} is odd; rotary positions need an even one")


class Fields:
    """Typed access to one JSON file; an error names the file, the field and what was expected."""

    def __init__(self, path: Path, values: Mapping[str, Any], section: str = "") -> None:
        self._path = path
        self._values = values
        self._section = section

    @classmethod
    def load(cls, path: Path) -> Fields:
        """The file's top-level object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(
                f"{path.parent} has no {path.name}; a Hugging Face model directory is needed"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path} must hold a JSON object")
        return cls(path, values)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same file with values for keys that it leaves out."""
        return Fields(self._path, {**defaults, **self._values})

    def section(self, name: str) -> Fields:
        """An object within the file; empty where it is absent or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{name} must be an object, got {value!r}")
        return Fields(self._path, value or {}, f"{name}: ")

    def get(self, name: str) -> Any:
        """The raw value, None where it is absent."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; required where `default` is None. Null counts as absent."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} must be a whole number, got {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; required where `default` is None. Null counts as absent."""
        value = self.integer(name, default)
        if value < 1:
            raise self.error(f"{name} must be at least 1, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number; required where `default` is None. Null counts as absent."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} must be a number, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false. Null counts as absent."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A required list of numbers."""
        value = self._present(name, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.error(f"{name} must be a list of numbers, got {value!r}")
        return tuple(float(item) for item in value)

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers, empty where it is absent or null."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(f"{name} must be a list of whole numbers, got {value!r}")
        return value

    def ids(self, name: str) -> list[int]:
        """A token id, a list of them, or nothing."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.error(f"{name} must be a token id or a list of token ids, got {value!r}")
        return ids

    def error(self, message: str) -> ModelLoadError:
        """An error that names the file."""
        return ModelLoadError(f"{self._path}: {self._section}{message}")

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        return value


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.get("hidden_act")
    if activation not in ("silu", "swish"):
        raise fields.error(f"activation {activation!r} (hidden_act) is not supported; supported: silu")
    quantization = fields.section("quantization_config")
    if quantization.get("quant_method") is not None:
        raise fields.error(
            f"quantization {quantization.get('quant_method')!r} is not supported; use a checkpoint in float32, float16 "
            "or bfloat16"
        )


def _read_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Windows by layer: from `layer_types` if given, else on the layers that the family's rule names."""
    window = fields.get("sliding_window")
    if not family.has_window or window is None:
        return (None,) * num_layers
    if family.window_switch and not fields.boolean(family.window_switch, False):
        return (None,) * num_layers
    window = fields.count("sliding_window")
    if family.window_layers == "all":
        return (window,) * num_layers
    kinds = fields.get("layer_types")
    if kinds is None and family.window_layers == "late":
        first = fields.integer("max_window_layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(known):
        raise fields.error(
            f"layer_types must name one of {', '.join(known)} for each of {num_layers} layers: {kinds!r}"
        )
    return tuple(known[kind] for kind in kinds)


def _read_sparsity(fields: Fields, family: Family, num_layers: int) -> Sparsity | None:
    """The experts of a family that has any. A layer has them where `decoder_sparse_step` divides its number, counted
    from one, and `mlp_only_layers` does not name it, counted from zero."""
    keys = family.experts
    if keys is None:
        return None
    num_experts = fields.count(next((key for key in keys.counts if fields.get(key) is not None), keys.counts[-1]))
    num_active = fields.count("num_experts_per_tok")
    if num_active > num_experts:
        raise fields.error(f"num_experts_per_tok {num_active} is more than the {num_experts} experts there are")
    step, dense = fields.count("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    return Sparsity(
        num_experts=num_experts,
        num_active=num_active,
        inner_size=fields.count(keys.inner_size),
        shared_size=fields.count(keys.shared_size) if keys.shared_size else None,
        is_renormalized=keys.is_renormalized or fields.boolean("norm_topk_prob", False),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
    )


def _read_end_ids(fields: Fields, model_dir: Path) -> tuple[int, ...]:
    ids = fields.ids("eos_token_id")
    path = model_dir / "generation_config.json"
    if path.exists():
        ids = ids + Fields.load(path).ids("eos_token_id")
    return tuple(sorted(set(ids)))


def _read_rope(fields: Fields) -> RopeScaling:
    """The rotary embedding, from `rope_parameters` (new) or `rope_scaling` (old), the kind under either key."""
    rope = fields.section("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_READERS:
        raise fields.error(f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_READERS)}")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise fields.error(f"partial_rotary_factor {share} is not supported; only whole heads are rotated")
    limit = fields.count("max_position_embeddings")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    trained = fields.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", limit)
    )
    return _ROPE_READERS[kind](rope, theta, limit, trained)


def _read_default(rope: Fields, theta: float, limit: int, trained: int) -> RopeScaling:
    return RopeScaling(theta, limit)


def _read_dynamic(rope: Fields, theta: float, limit: int, trained: int) -> RopeScaling:
    return RopeScaling(theta, limit, "dynamic", factor=rope.number("factor"))


def _read_linear(rope: Fields, theta: float, limit: int, trained: int) -> RopeScaling:
    """The limit in config.json is the trained one; the factor lengthens it."""
    factor = rope.number("factor")
    return RopeScaling(theta, int(limit * factor), "linear", factor=factor)


def _read_yarn(rope: Fields, theta: float, limit: int, trained: int) -> RopeScaling:
    """The limit in config.json may be the trained or the lengthened one."""
    factor = rope.number("factor")
    return RopeScaling(
        theta,
        max(limit, int(trained * factor)),
        "yarn",
        factor=factor,
        original_length=trained,
        attention_factor=_optional(rope, "attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _read_longrope(rope: Fields, theta: float, limit: int, trained: int) -> RopeScaling:
    return RopeScaling(
        theta,
        limit,
        "longrope",
        factor=rope.number("factor", limit / trained),
        original_length=trained,
        attention_factor=_optional(rope, "attention_factor"),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )


def _read_llama3(rope: Fields, theta: float, limit: int, trained: int) -> RopeScaling:
    return RopeScaling(
        theta,
        limit,
        "llama3",
        factor=rope.number("factor"),
        original_length=trained,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _optional(rope: Fields, name: str) -> float | None:
    return None if rope.get(name) is None else rope.number(name)


_ROPE_READERS = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
}


def served_spec(model_dir: Path, config: Config) -> ModelSpec:
    """The model in `model_dir` as `config` wants it served; raises ConfigError or ModelLoadError if that cannot be.

    Reads no weights, so it can be asked before anything starts.
    """
    spec = ModelSpec.read(model_dir)
    parallel, length = config.parallel, config.model.context_length
    if parallel.ep_size > 1:
        spec = spec.with_whole_experts(parallel.ep_size)
    spec.check_parallel(parallel.tp_size)
    if length is None:
        return spec
    if length > spec.context_length:
        raise ConfigError(f"model.context_length {length} is above the model's own limit of {spec.context_length}")
    return spec.with_context_length(length)
