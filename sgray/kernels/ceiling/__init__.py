"""How fast memory can be read: what every kernel that only moves bytes is measured against.

`read_sum(values_N, sums_P)`

values_N  (N,) float32, contiguous; N is a multiple of P. Every value is read once, nothing else is.
sums_P    (P,) float32, contiguous: the sum of each of P equal stretches of `values_N`, one program a stretch.

The caller allocates both. The best P differs by device: try some and keep the fastest.
"""
