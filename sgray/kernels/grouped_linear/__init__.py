"""Products of rows with the weight of their group: the experts of a mixture, each over the tokens that chose it.

`grouped_linear(x_RI, weight_EOI, groups, out_SO, *, in_rows_P=None, out_rows_P=None, scales_P=None)`

x_RI        (R, I), in the weight's dtype, columns contiguous.
weight_EOI  (E, O, I), contiguous, in bfloat16, float16 or float32.
groups      `Groups.of(groups_P, E)`: P rows in the order of their groups, made on the device without asking it for any
            number, so that it may be part of a CUDA graph. The same serves several products.
out_SO      (S, O), columns contiguous, any float.
in_rows_P   which row of x stands at each place of that order; x itself in that order if None.
out_rows_P  which row of out is written from each place, none twice; out in that order if None.
scales_P    float32 factors of each place; 1 if None.

For every place p of a group e: out[out_rows[p]] = scales[p] * x[in_rows[p]] W[e]^T. Rows of out for places of no group
keep what they hold. Sums are float32. A row's result depends on that row, its weight and the sizes alone, except that
the number of rows decides how a sum is cut. The caller allocates; out overlaps no input.
"""
