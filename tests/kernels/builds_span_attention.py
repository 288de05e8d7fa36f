"""The configurations of span attention that ship: decoding and verification, for the models we name and a few rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from aot import Build

from sgray.kernels.batch import MAX_DEPTH, MAX_PLACE
from sgray.kernels.boxes import BOX
from sgray.kernels.span_attention.kernel import PLAN_WARPS, _attend, _merge, _plan, choose, choose_merge
from sgray.kernels.span_attention.work import TILE, SpanLimits

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
LLAMA = (32, 8, 128)
SMOL = (9, 3, 64)


def limits(model: tuple[int, int, int], rows: int = 16, sequences: int = 16, page_size: int = 64) -> SpanLimits:
    heads, kv_heads, head_dim = model
    return SpanLimits(
        max_sequences=sequences,
        max_tokens=sequences,
        max_length=131072,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        rows_per_task=rows,
        num_sms=132,
    )


def attend(sizes: SpanLimits, dtype: torch.dtype = torch.bfloat16, *, sinks: bool = False, **flags: bool) -> Build:
    config = choose(sizes, dtype.itemsize)
    has_boxes = config.takes_boxes and sizes.page_size >= BOX
    box = f"tensordesc<bf16[1, {BOX}, {sizes.head_dim}]>"
    pointers: dict[str, str] = {
        **dict.fromkeys(("query", "keys", "values", "out"), POINTERS[dtype]),
        **dict.fromkeys(("page_table", "bins", "tasks", "entries"), "*i32"),
        **dict.fromkeys(("partials", "sums"), "*fp32"),
        **({"sinks": "*bf16"} if sinks else {}),
    }
    strides = ("query_stride", "query_head_stride", "out_stride", "out_head_stride", "page_stride")
    constants: dict[str, Any] = {
        "HEADS": sizes.num_heads,
        "GROUP": sizes.num_heads // sizes.num_kv_heads,
        "HEAD_DIM": sizes.head_dim,
        "BLOCK_D": 1 << (sizes.head_dim - 1).bit_length(),
        "PAGE": sizes.page_size,
        "ROWS": sizes.rows_per_task,
        "KEYS": config.block_keys,
        "HAS_BOXES": has_boxes,
        **({} if has_boxes else {"key_boxes": None, "value_boxes": None}),
        "HAS_WINDOW": False,
        "HAS_SOFTCAP": False,
        "PDL": False,
        **({} if sinks else {"sinks": None}),
        **flags,
    }
    is_half = dtype == torch.bfloat16
    return Build(
        _attend,
        pointers
        | (dict.fromkeys(("key_boxes", "value_boxes"), box) if has_boxes else {})
        | {"scale": "fp32", "softcap": "fp32", "window": "i32"}
        | dict.fromkeys((*strides, "table_stride"), "i32"),
        constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, *strides),
        expect=("UTMALDG" if has_boxes else "LDGSTS", "HGMMA" if sizes.rows_per_task >= 64 else "HMMA")
        if is_half
        else (),
        # 64 rows fill the registers; what does not fit is touched between tasks, not in the loop over keys.
        max_stack=32 if sizes.rows_per_task == 64 and constants["PDL"] else 0,
        portable=not constants["PDL"],
    )


def merge(sizes: SpanLimits, sinks: bool = False, dtype: torch.dtype = torch.bfloat16, pdl: bool = False) -> Build:
    config = choose_merge(sizes)
    pointers = {"rows": "*i32", "num_rows": "*i32", "partials": "*fp32", "sums": "*fp32", "out": POINTERS[dtype]}
    pointers |= {"sinks": "*bf16"} if sinks else {}
    constants: dict[str, Any] = {
        "HEADS": sizes.num_heads,
        "HEAD_DIM": sizes.head_dim,
        "BLOCK_D": 1 << (sizes.head_dim - 1).bit_length(),
        "BLOCK_H": config.block_heads,
        "SPLITS": config.block_splits,
        "PDL": pdl,
    }
    if not sinks:
        constants["sinks"] = None
    strides = ("out_stride", "out_head_stride")
    return Build(
        _merge,
        pointers | dict.fromkeys(strides, "i32"),
        constants,
        num_warps=config.num_warps,
        aligned=(*pointers, *strides),
        portable=not pdl,
    )


def plan(sizes: SpanLimits, window: bool = False, pdl: bool = False, sequences: int = 0) -> Build:
    shared = ("units", "paths", "num_units")
    tables = ("slots", "starts", "lengths", "firsts", "num_sequences", *(shared if sizes.max_shared else ()))
    tables += ("bins", "tasks", "entries", "rows", "num_rows", "shared_parts")
    integers = ("max_row_tokens", "window", "num_bins", "capacity", "path_stride")
    width = max(1 << (sizes.max_sequences - 1).bit_length(), 64)
    sequences = max(1 << (sequences or sizes.max_sequences).bit_length() - 1, 64)
    return Build(
        _plan,
        dict.fromkeys(tables, "*i32") | dict.fromkeys(integers, "i32"),
        {
            "TILE_KEYS": TILE,
            "TASK_TOKENS": sizes.tokens_per_task,
            "BLOCK_B": sequences,
            "BLOCK_U": width if sizes.max_shared else 0,
            "DEPTH": MAX_DEPTH,
            "PLACES": MAX_PLACE,
            **({} if sizes.max_shared else dict.fromkeys(shared)),
            "BLOCK_BINS": 1 << sizes.num_bins.bit_length(),
            "HAS_WINDOW": window,
            "PDL": pdl,
        },
        num_warps=PLAN_WARPS,
        aligned=tables,
        portable=not pdl,
    )


def builds() -> list[Build]:
    return [
        attend(limits(LLAMA), PDL=True),
        attend(limits(LLAMA, rows=32), PDL=True),
        attend(limits(LLAMA, rows=64), PDL=True),
        attend(limits(LLAMA), sinks=True, HAS_WINDOW=True, HAS_SOFTCAP=True, PDL=True),
        attend(limits(LLAMA), torch.float32),
        attend(limits(SMOL), PDL=True),
        attend(limits(SMOL, page_size=16)),
        merge(limits(LLAMA, sequences=1), sinks=True),
        merge(limits(LLAMA, sequences=256), pdl=True),
        plan(limits(LLAMA, sequences=512), pdl=True),
        plan(replace(limits(LLAMA, rows=64, sequences=512), max_shared=1024), pdl=True, sequences=256),
        plan(limits(SMOL), window=True),
    ]
