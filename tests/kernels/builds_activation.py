"""The gate of the MLP as shipped: models' inner sizes."""

from aot import Build

from sgray.kernels.activation.kernel import _silu_mul, block_of


def build(inner: int, dtype: str = "bf16", pdl: bool = True) -> Build:
    pointers = {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    strides = dict.fromkeys(("gate_up_stride", "out_stride"), "i32")
    constants = {"INNER": inner, "BLOCK": block_of(inner), "PDL": pdl}
    return Build(_silu_mul, {**pointers, **strides}, constants, aligned=(*pointers, *strides), portable=not pdl)


def builds() -> list[Build]:
    return [build(14336), build(1536), build(14336, pdl=False), build(1536, dtype="fp32", pdl=False)]
