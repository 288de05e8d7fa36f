"""RMS norm with the addition to the residual stream that comes before it: one pass over memory.

`add_rms_norm(residual_TI, delta_TI, weight_I, eps, out_TI, *, pdl=False)`

residual_TI  (T, I) float32, rows contiguous. Becomes residual + delta; untouched where delta is None.
delta_TI     (T, I) in the computing dtype, or None.
weight_I     (I,) any float dtype.
out_TI       (T, I) computing dtype or float32: residual / sqrt(mean(residual^2) + eps) * weight, rounded once.

Rows may lie apart (any stride between rows, 1 between columns); I is arbitrary. Everything is computed in float32. The
caller allocates all of it; out overlaps none of the inputs. Every row of T is computed, rows do not touch each other.
With `pdl`, weights are read before the predecessor is waited for, nothing else. The norm: Zhang and Sennrich, 2019.
"""
