"""The gate of a Llama-like MLP.

`silu_mul(gate_up_TF, out_TF, *, pdl=False)`

gate_up_TF  (T, 2F): the first F columns are the gate, the others the up projection; columns contiguous.
out_TF      (T, F): silu(gate) * up, computed in float32, rounded once to its dtype; columns contiguous.

Any float dtype and any F; rows may lie apart. The caller allocates; out does not overlap the input. Every row of T is
computed. The gated unit: Shazeer, "GLU variants improve transformer", 2020.
"""
