"""Products with the weight of a group as shipped: the experts of Qwen3-30B-A3B and Mixtral-8x7B, few rows and many."""

from typing import Any

from aot import Build

from sgray.kernels.grouped_linear.kernel import _grouped, choose


def build(block_rows: int, outputs: int, inputs: int, *, is_last: bool = False, dtype: str = "bf16") -> Build:
    """`is_last`: the product that is scaled and puts rows back, else the one that gathers them."""
    form = choose(block_rows, 4 if dtype == "fp32" else 2)
    signature = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "blocks_ptr": "*i32"}
    signature |= {"out_rows_ptr": "*i64", "scales_ptr": "*fp32"} if is_last else {"in_rows_ptr": "*i64"}
    signature |= {"out_ptr": "*fp32" if is_last else f"*{dtype}"}
    aligned = (*signature, "num_outputs", "x_stride", "out_stride")
    signature |= dict.fromkeys(("num_blocks", "num_outputs", "x_stride", "out_stride"), "i32")
    constants: dict[str, Any] = dict.fromkeys(
        ("in_rows_ptr",) if is_last else ("out_rows_ptr", "scales_ptr"),
    )
    constants |= {"INPUTS": inputs, "BLOCK_ROWS": block_rows, "STAGES": form.num_stages}
    constants |= {"BLOCK_OUTPUTS": form.block_outputs, "BLOCK_INPUTS": form.block_inputs}
    return Build(_grouped, signature, constants, form.num_warps, form.num_stages, aligned=aligned)


def builds() -> list[Build]:
    found = [build(16, 1536, 2048, dtype="fp32"), build(128, 1536, 2048, dtype="fp32")]
    for block_rows in (16, 32, 64, 128):
        found += [
            build(block_rows, 1536, 2048),
            build(block_rows, 2048, 768, is_last=True),
            build(block_rows, 4096, 14336, is_last=True),
        ]
    return found
