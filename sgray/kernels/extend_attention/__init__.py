"""Causal attention of a step's new rows over all keys of their sequences, for sequences that compute many at once.

    work = ExtendWork.allocate(max_sequences=, max_tokens=, num_heads=, num_kv_heads=, head_dim=, device=)   once
    pages = ExtendPages.of(keys, values)                                                                     a layer
    plan = plan_extends(work, batch, *, min_length, longest, only_last=False)                                a step
    attend_extends(query_THD, pages, page_table_SP, plan, out_THD,
                   *, scale, window=None, softcap=None, sinks_H=None, pdl=False)                             each

`plan_extends` cuts the sequences of a `BatchTables` that compute at least `min_length` (>= 1) tokens into tiles; the
others are some other kernel's. `longest` is the host's bound on start + length and only picks the size of the tiles.
With `only_last` the last tile of each sequence is planned, and none of its others.
The plan lives in the memory of `work`: the next plan replaces it. Nothing is read back; what is launched depends on
capacities alone, so both may be captured in a graph.

query_THD      (T, H, D) contiguous, rotated, T <= `max_tokens`. Rows of no planned sequence may hold anything.
keys, values   (page, token, K, D) of one layer: strided over pages, contiguous inside a page; the page size is a power
               of two, at least 16. The step's own keys and values are there already. H is a multiple of K, at most 64
               times; query head h reads key head h // (H / K).
page_table_SP  (S, P) int32, contiguous rows; entries beyond a sequence's last page are garbage.
out_THD        (T, H, D) contiguous, a buffer of its own: rows of planned sequences are written, others left alone.
scale          > 0, multiplies the scores.
softcap        a score becomes softcap * tanh(score / softcap), before any mask.
window         a row at position p sees the keys in (p - window, p]; at least 1.
sinks_H        (H,) float32: one more score in each head's softmax, of no value (arXiv 2309.17453).

D is a power of two from 16 to 256. Query, keys, values and out share a dtype; sums are float32. Whatever tokens after a
sequence's last one hold, NaN included, reaches no result, and a row's result does not depend, to the bit, on which
other sequences are in the batch.
"""
