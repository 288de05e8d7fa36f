"""What the benchmark launches."""

from aot import Build

from sgray.kernels.ceiling.kernel import BLOCK, _read_sum


def builds() -> list[Build]:
    return [
        Build(
            _read_sum,
            {"values_ptr": "*fp32", "sums_ptr": "*fp32", "stretch": "i32"},
            {"BLOCK": BLOCK},
            num_warps=8,
            aligned=("values_ptr", "sums_ptr", "stretch"),
        )
    ]
