"""Attention of few query rows over paged keys and values, cut into tasks: decoding, short extensions, verification.

A **task** is a span of keys (positions `[begin, end)` of one slot's page row), the query rows that read it, and where
each row's result goes. A **bin** is a run of tasks that one program computes. `plan_spans` lays the keys of all
sequences end to end and cuts them in equal bins, as many as programs run at once: how long a step takes depends on how
many keys it reads, not on how they are spread over sequences. A shared span as long as a bin has bins of its own. It
writes bins and tasks once for all layers of a step. `attend_spans` computes them and merges the partial results of rows
that several tasks read for. A task may be read by rows of several sequences, if the span is in the pages of them all:
where `batch.shared` names such spans, the planner emits them first, and of every sequence what is left.

Split keys with a second kernel that merges go back to flash-decoding (Dao et al., 2023); equal shares whatever the
lengths to Stream-K (Osama et al., 2023); spans shared by sequences to Hydragen (Juravsky et al., 2024).

`plan_spans(work, batch, *, max_row_tokens, window, pdl=False)`
    Plans every sequence of `batch` (`sgray.kernels.batch`) with 1 to `max_row_tokens` tokens and ignores longer ones.
    `batch` has at most `work.max_sequences` entries, and the planned tokens together are at most `work.max_tokens`.
    A token at position p is to see the keys at positions <= p and, with a `window`, > p - window. Shared units are
    looked at if `work.limits.max_shared` says so and there is no window; who reads them has at most as many tokens as
    a task holds.

`attend_spans(query_THD, keys, values, page_table_SP, work, out_THD, *, scale, window=None, softcap=None, sinks_H=None,
boxes=None, pdl=False)`
    out = softmax(scale * q k^T) v for the planned rows; nothing else is written to `out`. `window` is that of the plan.
    `softcap` replaces a score x by softcap * tanh(x / softcap). `sinks_H` adds a logit to each head's denominator.
    `boxes` (`sgray.kernels.boxes`) are the same keys and values for bulk loads, and may be left out.

- `query_THD` and `out_THD`: (T, H, D), last dimension contiguous, otherwise any strides; not the same memory. bfloat16,
  float16 or float32, the type of `keys` and `values` too. Accumulated in float32.
- `keys`, `values`: (page, token, K, D), any page stride, otherwise contiguous; H is a multiple of K. Head h reads
  key-value head h // (H / K). The page size is a power of two >= 16.
- `page_table_SP`: int32, row = slot, the page ids of its positions in order. Entries past a row's span are not read.
- What was never written (keys beyond a length, entries beyond a count) may hold NaN or garbage.
- `work` is `SpanWork.allocate(SpanLimits(...), device)`, made once, one for each window if there are several. A launch
  allocates nothing and reads no sizes back, so it can be captured in a graph; `work.for_capacity` makes its grids
  smaller. The tensors belong to one stream: a layer's partial results are gone when the next layer runs.
- With `pdl`, the task list and the page table are read before the wait on the kernel before: at least one kernel that
  waits must stand between `plan_spans` (or a write to the page table) and `attend_spans`.
"""
