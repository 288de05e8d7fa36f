"""The interpreter computes as a GPU does; without that no other test of a kernel means anything."""

import pytest
import torch
import triton
import triton.language as tl

interpreter = pytest.importorskip("interpreter")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels run on the GPU")


def test_bfloat16_arithmetic_is_torchs() -> None:
    interpreter.check()


def test_conversions_round_to_nearest_and_saturate() -> None:
    @triton.jit
    def cast(x_ptr, out_ptr, size: tl.constexpr):
        offsets = tl.arange(0, size)
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))

    x = torch.linspace(-600, 600, 256)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        out = torch.zeros(256, dtype=dtype)
        cast[(1,)](x, out, 256)
        wanted = x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x
        assert torch.equal(out.float(), wanted.to(dtype).float())
