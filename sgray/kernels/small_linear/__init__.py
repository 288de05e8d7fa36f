"""Products of 1 to 64 rows with a big weight: y = x W^T, bound by reading the weight.

`linear(x_TI, weight, out_TO, *, bias_O=None, into_residual=False, pdl=False)`

x_TI           (T, I), T in 1..64, in the weight's dtype, columns contiguous.
weight         `SmallWeight.of(weight_OI, gated=...)`, made once and kept: the weight (O, I), contiguous, in bfloat16,
               float16 or float32. Gated: its first O/2 rows are the gate, the others the up projection, and y is
               silu(gate) * up.
out_TO         (T, O), or (T, O/2) for a gated weight; columns contiguous, float32 or any smaller float.
bias_O         (O,), added before rounding; not with a gated weight.
into_residual  out is the residual stream in float32, and y is added to it; else y is stored.

O and I are arbitrary. Sums are float32. All rows of T are computed; rows do not touch each other. The caller allocates;
out overlaps no input. With `pdl`, one row of x finds the first part of its weights already requested when the
predecessor ends. `SmallWeight.is_worth(num_rows)` says whether this is expected to be faster than `torch.mm`,
`forms.choose` how it is computed.

The norm before a product is a kernel of its own even for one row: measured, folding it in makes every program read and
square the residual in float32, which costs more than the launch it saves.
"""
