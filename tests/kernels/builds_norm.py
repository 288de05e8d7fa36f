"""The norm as shipped: models' hidden sizes, with and without addition, both output dtypes."""

from aot import Build

from sgray.kernels.norm.kernel import _add_rms_norm, num_warps_of


def build(inputs: int, delta: str | None, out: str, dtype: str = "bf16", pdl: bool = True) -> Build:
    block = 1 << (inputs - 1).bit_length()
    pointers = {"residual_ptr": "*fp32", "weight_ptr": f"*{dtype}", "out_ptr": f"*{out}"}
    strides = dict.fromkeys(("residual_stride", "delta_stride", "out_stride"), "i32")
    constants = {"INPUTS": inputs, "BLOCK": block, "PDL": pdl}
    if delta is None:
        constants["delta_ptr"] = None
    else:
        pointers["delta_ptr"] = f"*{delta}"
    return Build(
        _add_rms_norm,
        {**pointers, "eps": "fp32", **strides},
        constants,
        num_warps=num_warps_of(block),
        aligned=(*pointers, *strides),
        portable=not pdl,
    )


def builds() -> list[Build]:
    return [
        build(4096, "bf16", "bf16"),
        build(4096, None, "bf16"),
        build(5120, "bf16", "bf16"),
        build(576, "bf16", "bf16"),
        build(576, "bf16", "bf16", pdl=False),
        build(4096, "fp32", "fp32", dtype="fp32", pdl=False),
    ]
