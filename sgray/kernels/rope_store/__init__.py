"""Rotates the queries and keys of a step and puts its keys and values into their pages, in one launch.

    rope_store(qkv_TX, query_THD, keys, values, positions_T, locations_T, rotation_PD,
               *, num_heads, num_kv_heads, query_norm_D=None, key_norm_D=None, eps=0.0, pdl=False)

qkv_TX        (T, (H + 2 K) * D) in the computing dtype: query, key, value heads. Rows may be strided. Read only.
query_THD     (T, H, D) contiguous, same dtype, a buffer of its own: takes the rotated queries.
keys, values  (page, token, K, D) of one layer, same dtype and strides: strided over pages, contiguous inside a page;
              the page size is a power of two. Row t goes to token `locations_T[t] % page size` of page
              `locations_T[t] // page size`; no two rows share a location.
positions_T   (T,) int32: a row of `rotation_PD` each.
locations_T   (T,) int32; -1 marks padding: such a row stores nothing anywhere, and its position may be garbage.
rotation_PD   (P, D) float32 contiguous: cosines, then sines, any attention factor included.
*_norm_D      (D,) float32: weights of an RMS norm (arXiv 1910.07467) of every query and every key head before the
              rotation (Qwen3): both or neither; `eps` is added to the mean square.

Head (a, b), two halves, becomes (a cos - b sin, b cos + a sin), in float32 and rounded once. Values are copied. D is a
power of two, at least 16.
With `pdl` only the kernel launched just before may still be running: it must not be the one that writes positions or
locations.
"""
