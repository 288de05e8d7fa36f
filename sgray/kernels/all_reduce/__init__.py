"""Sums over the ranks of one node, each of which reaches the memory of the others by address.

`one_shot(x, peers, out, *, pdl=False)`
`two_shot(x, peers, out, *, pdl=False)`
`add_rms_norm(x_TI, peers, residual_TI, weight_I, eps, out_TI, *, pdl=False)`
`all_gather(x_TN, peers, out_TRN, *, pdl=False)`

x            this rank's part, contiguous, in the computing dtype; one that `fits_...` in the memory of `peers`.
out          of x's shape and dtype, contiguous, may be x: the sum over the ranks, made in float32 in the order of the
             ranks and rounded once, hence equal to the bit on all of them.
x_TI         this rank's part, rows of columns that lie side by side. It is only read.
residual_TI  (T, I) float32, becomes residual + sum of the ranks' x, which is not rounded before.
weight_I     (I,) any float dtype.
out_TI       (T, I) computing dtype or float32: residual / sqrt(mean(residual^2) + eps) * weight, rounded once.
x_TN         this rank's part of each row; out_TRN (T, ranks, N), of the same dtype, columns side by side, gets all.
peers        `Peers` of this rank, and of the group alone; in the reference a function that gives the ranks' tensors.

All ranks call the same functions in the same order with tensors of the same shape and dtype, one call at a time each,
as on one stream. The caller allocates. T, I, N and the number of elements are arbitrary, and above zero. Calls may be
part of a CUDA graph: nothing that changes between two calls is an argument. With `pdl`, weights are read before the
predecessor is waited for, nothing else.

One shot: everyone reads everything of everyone. Two shots: everyone sums its share of the elements, then reads the
others' shares, which moves 2 / ranks of the bytes and meets twice. A rank waits in its kernel for the others, without a
limit: where one has died, nothing but the end of the process ends the kernel, so somebody outside has to watch.

Ideas: the one-shot and two-shot sums of TensorRT-LLM and vLLM, PyTorch's symmetric memory, and the fusion with the norm
of Kraken. No multicast (`multimem`) is used.
"""
