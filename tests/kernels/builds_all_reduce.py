"""The sums over ranks as shipped: two and eight ranks, with the largest blocks that their limits allow."""

from typing import Any

from aot import Build

from sgray.kernels.all_reduce.kernel import (
    MIN_SHARE,
    NUM_WARPS,
    ONE_SHOT_BLOCK,
    _add_rms_norm,
    _all_gather,
    _one_shot,
    _two_shot,
    num_warps_of,
)

NUMBERS = ("rank", "room_bytes", "num_programs")
FORBIDDEN = ("multimem",)


def flat(kernel: Any, dtype: str, ranks: int, *, pdl: bool = True, **constants: int) -> Build:
    pointers = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "addresses_ptr": "*i64"}
    sizes = dict.fromkeys([one for one in (*extra_of(kernel), "size", *NUMBERS) if one not in constants], "i32")
    return Build(
        kernel,
        {**pointers, **sizes},
        {"RANKS": ranks, "LANES": 1 << (ranks - 1).bit_length(), **constants, "PDL": pdl, "LINE": 32},
        num_warps=NUM_WARPS,
        aligned=(*pointers, *extra_of(kernel), "size", "room_bytes"),
        expect=("LDG.E.128",) if kernel is not _all_gather else (),
        forbid=FORBIDDEN,
        portable=not pdl,
    )


def extra_of(kernel: Any) -> tuple[str, ...]:
    return ("columns", "x_stride", "row_stride", "rank_stride") if kernel is _all_gather else ()


def norm(inputs: int, dtype: str, ranks: int, *, pdl: bool = True, **ones: int) -> Build:
    """`ones` are arguments that are 1, of which Triton makes constants."""
    block = 1 << (inputs - 1).bit_length()
    pointers = {
        "x_ptr": f"*{dtype}",
        "residual_ptr": "*fp32",
        "weight_ptr": "*fp32",
        "out_ptr": f"*{dtype}",
        "addresses_ptr": "*i64",
    }
    strides = ("x_stride", "residual_stride", "out_stride")
    constants = {"RANKS": ranks, "LANES": 1 << (ranks - 1).bit_length(), "INPUTS": inputs}
    return Build(
        _add_rms_norm,
        {
            **pointers,
            "eps": "fp32",
            **dict.fromkeys([one for one in ("rows", *strides, *NUMBERS) if one not in ones], "i32"),
        },
        {**constants, **ones, "PITCH": -(-inputs // 16) * 16, "BLOCK": block, "PDL": pdl, "LINE": 32},
        num_warps=num_warps_of(block),
        aligned=(*pointers, *strides, "room_bytes"),
        forbid=FORBIDDEN,
        portable=not pdl,
    )


def builds() -> list[Build]:
    return [
        flat(_one_shot, "bf16", 2, BLOCK=ONE_SHOT_BLOCK),
        flat(_one_shot, "bf16", 8, BLOCK=ONE_SHOT_BLOCK),
        flat(_one_shot, "bf16", 2, BLOCK=8192),
        flat(_one_shot, "bf16", 2, BLOCK=ONE_SHOT_BLOCK, rank=1),
        flat(_one_shot, "fp32", 6, BLOCK=ONE_SHOT_BLOCK, pdl=False),
        flat(_two_shot, "bf16", 2, SHARE=4096),
        flat(_two_shot, "bf16", 8, SHARE=1024),
        flat(_two_shot, "fp32", 3, SHARE=MIN_SHARE, pdl=False),
        flat(_all_gather, "fp32", 8, BLOCK=ONE_SHOT_BLOCK),
        flat(_all_gather, "fp32", 2, BLOCK=ONE_SHOT_BLOCK, pdl=False),
        norm(4096, "bf16", 2),
        norm(4096, "bf16", 2, rank=1, rows=1),
        norm(4096, "bf16", 8),
        norm(8192, "bf16", 8),
        norm(576, "bf16", 2, pdl=False),
    ]
