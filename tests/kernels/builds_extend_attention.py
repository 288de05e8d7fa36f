"""Attention of extends as it is shipped: tiles of 64 and 128 rows over bulk loads, rows of small pages, float32."""

import torch
from aot import Build

from sgray.kernels.boxes import BOX
from sgray.kernels.extend_attention import hopper
from sgray.kernels.extend_attention.kernel import PLAN_CELLS, _attend, _plan
from sgray.kernels.extend_attention.work import choose

LLAMA, SMOLLM = (32, 8, 128), (9, 3, 64)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLAGS = ("HAS_WINDOW", "HAS_CAP", "HAS_SINKS", "PDL")


def builds() -> list[Build]:
    return [
        _planner(16),
        _attention("bf16", LLAMA, rows=64),
        _attention("bf16", LLAMA, rows=64, PDL=True),
        _attention("bf16", LLAMA, rows=128, PDL=True),
        _attention("bf16", LLAMA, rows=64, HAS_WINDOW=True, HAS_CAP=True, HAS_SINKS=True),
        _attention("bf16", LLAMA, rows=64, page_size=16),
        _attention("bf16", LLAMA, rows=128, page_size=16),
        _attention("bf16", SMOLLM, rows=64),
        _attention("fp32", SMOLLM, rows=64),
        _specialised("bf16", LLAMA),
        _specialised("fp16", SMOLLM),
    ]


def _planner(tokens: int) -> Build:
    tables = dict.fromkeys(("slots_ptr", "starts_ptr", "lengths_ptr", "firsts_ptr", "num_sequences_ptr"), "*i32")
    sequences = 512
    return Build(
        kernel=_plan,
        signature={**tables, "tiles_ptr": "*i32", "num_tiles": "i32", "min_length": "i32"},
        constants={"TOKENS": tokens, "MOST": 1, "SEQUENCES": sequences, "TILES": PLAN_CELLS // sequences},
        aligned=(*tables, "tiles_ptr"),
    )


def _attention(dtype: str, model: tuple[int, int, int], *, rows: int, page_size: int = 64, **flags: bool) -> Build:
    heads, kv_heads, head_dim = model
    has_boxes = dtype != "fp32" and page_size >= BOX
    shape = choose(DTYPES[dtype], head_dim, rows, has_boxes=has_boxes)
    side = f"tensordesc<{dtype}[1, {BOX}, {head_dim}]>" if has_boxes else f"*{dtype}"
    pointers = {
        "query_ptr": f"*{dtype}",
        "keys": side,
        "values": side,
        "page_table_ptr": "*i32",
        "tiles_ptr": "*i32",
        "sinks_ptr": "*fp32",
        "out_ptr": f"*{dtype}",
    }
    scalars = {"factor": "fp32", "cap": "fp32", "window": "i32", "table_stride": "i32", "page_stride": "i32"}
    return Build(
        kernel=_attend,
        signature={**pointers, **scalars},
        constants={
            "H": heads,
            "K": kv_heads,
            "D": head_dim,
            "PAGE": page_size,
            "ROWS": rows,
            "KEYS": shape.keys,
            "STAGES": shape.stages,
            "HAS_BOXES": has_boxes,
            **{flag: flags.get(flag, False) for flag in FLAGS},
        },
        num_warps=shape.warps,
        aligned=(*(name for name, kind in pointers.items() if kind.startswith("*")), "page_stride"),
        expect=("HGMMA",) + ("UTMALDG",) * has_boxes if dtype != "fp32" else (),
        # 128 rows on 4 warps do not fit the registers; measured beyond 8k keys they are the fastest all the same.
        max_stack=256 if rows == 128 and has_boxes else 0,
        portable=not has_boxes and not flags.get("PDL", False),
    )


def _specialised(dtype: str, model: tuple[int, int, int]) -> Build:
    """The form for Hopper alone."""
    heads, kv_heads, head_dim = model
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    side = f"tensordesc<{dtype}[{hopper.KEYS}, {head_dim}],{hopper.layout_of(name, head_dim)!r}>"
    pointers = {"query_ptr": f"*{dtype}", "page_table_ptr": "*i32", "tiles_ptr": "*i32", "out_ptr": f"*{dtype}"}
    scalars = {"factor": "fp32", "table_stride": "i32", "page_stride": "i32"}
    return Build(
        kernel=hopper._attend,
        signature={**pointers, "keys": side, "values": side, **scalars},
        constants=hopper.constants(heads, kv_heads, head_dim, page_size=64),
        aligned=tuple(pointers),
        expect=("HGMMA", "UTMALDG"),
        portable=False,
        options={"maxnreg": hopper.REGISTERS},
    )
