"""Draws one token for every row of a step, on the device, without a sort and without waiting for the device.

`sample(logits_RV, slots_R, positions_R, state, tokens_R, *, bitmask_RW=None, num_rows_1=None, pdl=False)`

- `logits_RV` float32, contiguous along V; the row stride may exceed V. Not modified. V is at most the state's
  vocabulary, R at most its `max_rows`.
- `slots_R` int32: whose wishes hold for the row; a row with a negative slot is skipped. No slot occurs twice.
- `positions_R` int32: index in its sequence of the token to be drawn, so that the generated token's own index is
  `position - num_prompt`.
- `state`: a `SamplingState` (`state.py`): the wishes of every slot, and memory that `sample` uses while it runs.
- `tokens_R` int32, written: the token, or -1 where the raw logits hold NaN or +inf, or where nothing finite is left
  after bias, penalties, held-back ends and mask. Skipped rows keep what they held.
- `bitmask_RW` int32, W at least ceil(V / 32): bit i % 32 of word i // 32 is set where token i is allowed. It is read
  only for slots described with `is_masked`.
- `num_rows_1` int32: only the first `num_rows_1[0]` rows mean anything; None means all R.
- The drawn token is added to `state.counts_SV` for slots that have a penalty.

Order of the steps: logit bias, penalties, end ids held back, mask; then the largest logit (the lowest id of equals) if
the temperature is 0 or top_k is 1; else temperature, top-k, top-p over what top-k left, min-p, and a draw. Top-k keeps
exactly k tokens, top-p the fewest whose mass reaches p; of equal logits at the edge the lowest ids stay.

The draw is an exponential race: token i arrives after E_i / weight_i, the first wins. E_i is a hash of (seed, index,
token id), so it depends on nothing of the batch, needs no generator state, and filters do not change it.
"""
