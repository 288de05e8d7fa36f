"""The rotation as it is shipped: Llama-3.1-8B, SmolLM2-135M, Qwen3-8B with its norms, and one in float32."""

from aot import Build

from sgray.kernels.rope_store.kernel import HEADS, _rope_store, warps

MODELS = [
    ("bf16", 32, 8, 128, False),
    ("bf16", 9, 3, 64, False),
    ("bf16", 32, 8, 128, True),
    ("fp32", 32, 8, 128, True),
]


def builds() -> list[Build]:
    return [_build(*model) for model in MODELS] + [_build(*MODELS[0], pdl=True)]


def _build(dtype: str, heads: int, kv_heads: int, head_dim: int, has_norm: bool, pdl: bool = False) -> Build:
    tensors = dict.fromkeys(("qkv_ptr", "query_ptr", "keys_ptr", "values_ptr"), f"*{dtype}")
    indices = dict.fromkeys(("positions_ptr", "locations_ptr"), "*i32")
    weights = dict.fromkeys(("rotation_ptr", "query_norm_ptr", "key_norm_ptr"), "*fp32")
    strides = {"qkv_stride": "i32", "page_stride": "i32"}
    return Build(
        kernel=_rope_store,
        signature={**tensors, **indices, **weights, "eps": "fp32", **strides},
        constants={
            "H": heads,
            "K": kv_heads,
            "D": head_dim,
            "PAGE": 64,
            "BLOCKS": -(-(heads + 2 * kv_heads) // HEADS),
            "HEADS": HEADS,
            "HAS_NORM": has_norm,
            "PDL": pdl,
        },
        num_warps=warps(head_dim),
        aligned=(*tensors, *indices, *weights, *strides),
        portable=not pdl,
    )
