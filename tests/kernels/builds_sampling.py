"""The shipped configurations of sampling: few and many rows of the vocabularies of Llama 3 and SmolLM2."""

import triton
from aot import Build

from sgray.kernels.sampling.kernel import _decide, _survey, choose

COMMON = {
    "logits_ptr": "*fp32",
    "logits_stride": "i32",
    "vocab_size": "i32",
    "slots_ptr": "*i32",
    "positions_ptr": "*i32",
    "num_rows_ptr": "*i32",
    "floats_ptr": "*fp32",
    "ints_ptr": "*i32",
    "counts_ptr": "*i16",
    "counts_stride": "i32",
    "adjusted_ptr": "*fp32",
    "adjusted_stride": "i32",
    "scores_ptr": "*fp32",
    "ids_ptr": "*i32",
    "tops_ptr": "*fp32",
    "parts_stride": "i32",
}
LISTS = {
    "ends_ptr": "*i32",
    "bias_ids_ptr": "*i32",
    "bias_values_ptr": "*fp32",
    "mask_ptr": "*i32",
    "mask_stride": "i32",
}
LAST = {"near_ids_ptr": "*i32", "near_values_ptr": "*fp32", "tokens_ptr": "*i32", "num_parts": "i32"}
UNALIGNED = ("num_parts", "parts_stride", "mask_stride")


def builds() -> list[Build]:
    found = []
    for num_rows, vocab_size, pdl in ((1, 128256, True), (256, 128256, True), (256, 49152, False)):
        sizes = choose(num_rows, vocab_size, num_sms=132)
        flags = {"HAS_MASK": True, "HAS_NUM_ROWS": True, "PDL": pdl}
        parts = triton.next_power_of_2(triton.cdiv(vocab_size, sizes.block))
        found += [
            build(_survey, COMMON | LISTS, flags | {"BLOCK": sizes.block}, sizes.survey_warps, pdl),
            build(
                _decide,
                COMMON | LAST,
                flags | {"IS_ALIGNED": True, "PARTS": parts, "BLOCK": sizes.block, "TILE": sizes.tile},
                sizes.decide_warps,
                pdl,
            ),
        ]
    return found


def build(kernel: object, signature: dict[str, str], constants: dict[str, object], num_warps: int, pdl: bool) -> Build:
    aligned = tuple(name for name in signature if name not in UNALIGNED)
    # The instructions that let a kernel begin early exist on Hopper only.
    return Build(kernel, signature, constants, num_warps=num_warps, aligned=aligned, portable=not pdl)
