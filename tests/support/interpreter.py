"""Makes Triton's interpreter compute bfloat16 and float8 as a GPU does.

Unpatched, Triton 3.6 keeps bfloat16 as 16-bit integers and does integer arithmetic on them, truncates float32 to
bfloat16, and loses the carry of float32 to float8. Here every conversion goes through torch, and every operation on
bfloat16 is done in float32 and rounded once. `check` fails if a new Triton has changed what is replaced.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
# The GPU's conversion saturates.
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
BITS = {tl.bfloat16: torch.int16, tl.float8e4nv: torch.uint8, tl.float8e5: torch.uint8}

Handle = interpreter.TensorHandle


def install() -> None:
    """Replaces the interpreter's operations; a second call does nothing."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 must be in the environment before triton is imported")
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "is_exact"):
        return
    _replace_conversions(builder)
    _replace_arithmetic(builder)
    _replace_reductions()
    builder.is_exact = True


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """An array that holds `source`, rounded to nearest even as `target`."""
    values = torch.from_numpy(np.ascontiguousarray(data))
    if values.dtype != DTYPES[source]:
        values = values.view(DTYPES[source])
    if source in LARGEST:
        values = values.float()
    if target in LARGEST:
        values = values.float().clamp(-LARGEST[target], LARGEST[target])
    values = values.to(DTYPES[target])
    if target in BITS:
        values = values.view(BITS[target])
    return values.numpy().view(interpreter._get_np_dtype(target)).reshape(data.shape)


def check() -> None:
    """Fails where the patch does not hold: a product and a sum in bfloat16 against torch."""

    @triton.jit
    def multiply_add(x_ptr, y_ptr, out_ptr, size: tl.constexpr):
        offsets = tl.arange(0, size)
        x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
        tl.store(out_ptr + offsets, x * y + x)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator).bfloat16()
    y = torch.randn(64, generator=generator).bfloat16()
    out = torch.full_like(x, float("nan"))
    multiply_add[(1,)](x, y, out, 64)
    assert torch.equal(out, x * y + x), "bfloat16 in Triton's interpreter is wrong; its internals have changed"


def _is_bf16(handle: Handle) -> bool:
    return not isinstance(handle.dtype, tl.pointer_type) and handle.dtype.scalar == tl.bfloat16


def _widen(handle: Handle) -> Handle:
    return Handle(convert(handle.data, tl.bfloat16, tl.float32), tl.float32) if _is_bf16(handle) else handle


def _narrow(array: np.ndarray) -> Handle:
    return Handle(convert(np.asarray(array, dtype=np.float32), tl.float32, tl.bfloat16), tl.bfloat16)


def _replace_conversions(builder: type) -> None:
    old = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        if source in DTYPES and target in DTYPES and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
            return convert(data, source, target)
        return old(data, source, target, rounding)

    def cast_impl(self, source, target_type):
        before, after = source.dtype.scalar, target_type.scalar
        if before in DTYPES and after in DTYPES:
            return Handle(convert(source.data, before, after), after)
        if after == tl.bfloat16:
            return _narrow(source.data)
        return Handle(_widen(source).data.astype(interpreter._get_np_dtype(target_type)), after)

    interpreter._convert_float = convert_float
    builder.cast_impl = cast_impl
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: _narrow(np.array([value]))


def _replace_arithmetic(builder: type) -> None:
    binary, unary, ternary, dot, fma = (
        getattr(builder, name) for name in ("binary_op", "unary_op", "ternary_op", "create_dot", "create_fma")
    )

    def binary_op(self, left, right, operation):
        if not (_is_bf16(left) or _is_bf16(right)):
            return binary(self, left, right, operation)
        out = operation(_widen(left).data, _widen(right).data)
        return Handle(out, tl.int1) if out.dtype == np.bool_ else _narrow(out)

    def unary_op(self, value, operation):
        return _narrow(operation(_widen(value).data)) if _is_bf16(value) else unary(self, value, operation)

    def ternary_op(self, first, second, third, operation):
        if operation is np.where or not _is_bf16(third):
            return ternary(self, first, second, third, operation)
        return _narrow(operation(_widen(first).data, _widen(second).data, _widen(third).data))

    def create_dot(self, left, right, start, *rest):
        return dot(self, _widen(left), _widen(right), start, *rest)

    def create_fma(self, x, y, z):
        return _narrow(_widen(x).data * _widen(y).data + _widen(z).data) if _is_bf16(z) else fma(self, x, y, z)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.create_dot, builder.create_fma = create_dot, create_fma


def _replace_reductions() -> None:
    old = interpreter.ReduceOps.apply_impl

    def apply_impl(self, inputs):
        if not any(value.dtype == tl.bfloat16 for value in inputs):
            return old(self, inputs)
        wide = tuple(
            self.to_tensor(_widen(value.handle).data, tl.float32) if value.dtype == tl.bfloat16 else value
            for value in inputs
        )
        out = old(self, wide)

        def narrow(before, after):
            if before.dtype != tl.bfloat16 or after.dtype != tl.float32:
                return after
            kind = after.type.with_element_ty(tl.bfloat16) if after.type.is_block() else tl.bfloat16
            return tl.core.tensor(_narrow(after.handle.data), kind)

        if isinstance(out, list | tuple):
            return tuple(narrow(before, after) for before, after in zip(inputs, out, strict=True))
        return narrow(inputs[0], out)

    interpreter.ReduceOps.apply_impl = apply_impl
