"""Products of few rows as shipped: the weights of Llama-3.1-8B and SmolLM2-135M, 1 to 64 rows."""

from typing import Any

from aot import Build

from sgray.kernels.small_linear.forms import RowForm, TileForm, choose
from sgray.kernels.small_linear.kernel import _row, _tile


def row(outputs: int, inputs: int, out: str, *, add: bool = False, gated: bool = False, dtype: str = "bf16") -> Build:
    form = choose(1, outputs, inputs, gated=gated)
    assert isinstance(form, RowForm)
    pointers = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "out_ptr": f"*{out}"}
    constants: dict[str, Any] = {"bias_ptr": None, "INPUTS": inputs, "BLOCK": form.block_inputs}
    constants |= {"GATED": gated, "ADD": add, "PDL": True}
    if outputs == 1:  # Triton makes a constant of an argument that is 1
        constants["num_outputs"], signature = 1, pointers
    else:
        signature = {**pointers, "num_outputs": "i32"}
    return Build(_row, signature, constants, form.num_warps, aligned=tuple(signature), portable=False)


def tile(
    rows: int,
    outputs: int,
    inputs: int,
    out: str,
    *,
    add: bool = False,
    gated: bool = False,
    boxes: bool = True,
    dtype: str = "bf16",
) -> Build:
    form = choose(rows, outputs, inputs, element_bytes=4 if dtype == "fp32" else 2, gated=gated)
    assert isinstance(form, TileForm)
    x = f"tensordesc<{dtype}[{form.block_rows}, {form.block_inputs}]>" if boxes else f"*{dtype}"
    weight = f"tensordesc<{dtype}[{form.block_outputs}, {form.block_inputs}]>" if boxes else f"*{dtype}"
    integers = dict.fromkeys(("num_rows", "num_outputs", "x_stride", "out_stride"), "i32")
    constants = {"bias_ptr": None, "INPUTS": inputs, "BLOCK_ROWS": form.block_rows}
    constants |= {"BLOCK_OUTPUTS": form.block_outputs, "BLOCK_INPUTS": form.block_inputs, "STAGES": form.num_stages}
    constants |= {"BOXES": boxes, "SWAPPED": form.is_swapped, "GATED": gated, "ADD": add, "PDL": boxes}
    return Build(
        _tile,
        {"x": x, "weight": weight, "out_ptr": f"*{out}", **integers},
        constants,
        form.num_warps,
        form.num_stages,
        aligned=("out_ptr", "num_outputs", "x_stride", "out_stride", *(() if boxes else ("x", "weight"))),
        expect=("HGMMA", "UTMALDG") if boxes else (),
        portable=not boxes,
    )


def builds() -> list[Build]:
    found = [
        row(6144, 4096, "bf16"),
        row(4096, 4096, "fp32", add=True),
        row(28672, 4096, "bf16", gated=True),
        row(4096, 14336, "fp32", add=True),
        row(128256, 4096, "fp32"),
        row(960, 576, "bf16"),
        row(3072, 576, "bf16", gated=True),
        row(576, 1536, "fp32", add=True),
        row(1, 2048, "bf16"),
        row(1, 2048, "bf16", gated=True),
        row(28672, 4096, "fp32", gated=True, dtype="fp32"),
    ]
    for rows in (16, 32, 64):
        found += [
            tile(rows, 6144, 4096, "bf16"),
            tile(rows, 4096, 14336, "fp32", add=True),
            tile(rows, 28672, 4096, "bf16", gated=True),
            tile(rows, 128256, 4096, "fp32"),
        ]
    return [*found, tile(16, 960, 576, "bf16", boxes=False), tile(16, 960, 576, "fp32", boxes=False, dtype="fp32")]
