"""Sampling in two kernels: parts of rows in parallel, then one program a row that decides.

The first reads the logits once, wherever it can: it changes what bias, penalties, ends and mask change (such rows alone
are written out), and finds the best of its part. The second picks the best part. Of rows with a filter it lists the
tokens from a floor up, which it takes from what the parts found; nearly always these are few and provably hold all that
the filter leaves. Else it goes through the row again: a few passes that each cut the range of the filter's edge into
nine, until the tokens within the range fit the program. Among the listed tokens the edge is found to the last bit. This
knows logits and slots, nothing of sequences.

Finding the edge without a sort follows FlashInfer's sampling kernels and Qrita (arXiv 2602.01518) in spirit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgray.kernels.launch import features, is_interpreted
from sgray.kernels.sampling.state import (
    GENERATED_BITS,
    IS_MASKED,
    IS_PENALISED,
    MAX_CANDIDATES,
    MIN_BLOCK,
    NUM_FIELDS,
    SamplingState,
)
from sgray.protocol import MAX_END_IDS, MAX_LOGIT_BIASES

FIELDS = tl.constexpr(NUM_FIELDS)
ENDS = tl.constexpr(MAX_END_IDS)
BIASES = tl.constexpr(MAX_LOGIT_BIASES)
CANDIDATES = tl.constexpr(MAX_CANDIDATES)
GENERATED = tl.constexpr(GENERATED_BITS)
MASKED = tl.constexpr(IS_MASKED)
PENALISED = tl.constexpr(IS_PENALISED)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
FAINTEST = tl.constexpr(1e-30)  # a weight that may still divide a number of tokens
PIVOTS = tl.constexpr(8)
# Equal steps of value narrow a range around zero, steps of bit patterns end in any case.
MAX_VALUE_PASSES = tl.constexpr(6)
LIST_TILE = tl.constexpr(4 * MIN_BLOCK)  # tokens loaded at once for the list
FLOOR_STEPS = tl.constexpr(20)  # of bisection; a floor somewhat too low is a floor too
MASS_DEPTH = tl.constexpr(12.0)  # binary orders of magnitude below the best token that nearly always hold top-p's mass


@dataclass(frozen=True, slots=True)
class Sizes:
    """`block`: tokens that one program of the first kernel surveys. `tile`: tokens of a row that the second loads."""

    block: int
    survey_warps: int
    tile: int
    decide_warps: int


def choose(num_rows: int, vocab_size: int, num_sms: int) -> Sizes:
    """Small parts while they leave multiprocessors idle, larger ones then. No result depends on the choice."""
    parts = triton.cdiv(vocab_size, MIN_BLOCK)
    block = MIN_BLOCK if num_rows * parts <= 8 * num_sms else 2 * MIN_BLOCK
    return Sizes(block=block, survey_warps=block // 256, tile=2048, decide_warps=8)


def sample(
    logits_RV: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    state: SamplingState,
    tokens_R: Tensor,
    *,
    bitmask_RW: Tensor | None = None,
    num_rows_1: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """See the folder's docstring."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    assert num_rows <= len(state.adjusted_RV) and vocab_size <= state.counts_SV.shape[1]
    if num_rows == 0:
        return
    facts = features(logits_RV.device)
    sizes = choose(num_rows, vocab_size, facts.num_sms)
    has_pdl = pdl and facts.has_pdl
    launch = {} if is_interpreted() else {"launch_pdl": has_pdl}
    num_parts = triton.cdiv(vocab_size, sizes.block)
    mask = slots_R[None] if bitmask_RW is None else bitmask_RW
    rows = (slots_R, positions_R, slots_R if num_rows_1 is None else num_rows_1)
    tables = (state.floats_S, state.ints_S, state.counts_SV, state.counts_SV.stride(0))
    adjusted = (state.adjusted_RV, state.adjusted_RV.stride(0))
    parts = (state.scores_RN, state.ids_RN, state.tops_RN, state.scores_RN.stride(0))
    lists = (state.end_ids_SE, state.bias_ids_SN, state.bias_values_SN)
    near = (state.near_ids_RC, state.near_values_RC)
    flags = {"HAS_MASK": bitmask_RW is not None, "HAS_NUM_ROWS": num_rows_1 is not None, "PDL": has_pdl}
    source = (logits_RV, logits_RV.stride(0), vocab_size)
    is_aligned = logits_RV.stride(0) % 4 == 0 and logits_RV.data_ptr() % 16 == 0
    _survey[(num_parts, num_rows)](
        *source, *rows, *tables, *adjusted, *parts, *lists, mask, mask.stride(0),
        **flags, BLOCK=sizes.block, num_warps=sizes.survey_warps, **launch,
    )  # fmt: skip
    _decide[(num_rows,)](
        *source, *rows, *tables, *adjusted, *parts, *near, tokens_R, num_parts,
        **flags, IS_ALIGNED=is_aligned, PARTS=triton.next_power_of_2(num_parts), BLOCK=sizes.block,
        TILE=sizes.tile, num_warps=sizes.decide_warps, **launch,
    )  # fmt: skip


@triton.jit
def _survey(
    logits_ptr, logits_stride, vocab_size,
    slots_ptr, positions_ptr, num_rows_ptr,
    floats_ptr, ints_ptr, counts_ptr, counts_stride,
    adjusted_ptr, adjusted_stride,
    scores_ptr, ids_ptr, tops_ptr, parts_stride,
    ends_ptr, bias_ids_ptr, bias_values_ptr,
    mask_ptr, mask_stride,
    HAS_MASK: tl.constexpr, HAS_NUM_ROWS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one row: its largest logit (+inf if it holds one or NaN), and its best score with the id.

    The score is the logit itself for greedy rows, the race's for rows drawn without a filter. Where there is a filter
    the part's mass, as a multiple of its best token's, stands in the score's place.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
    ids = part * BLOCK + tl.arange(0, BLOCK)
    is_inside = ids < vocab_size
    row_ptr = logits_ptr + row * logits_stride
    values = tl.load(row_ptr + ids, mask=is_inside, other=float("-inf"))
    slot = _slot(slots_ptr, num_rows_ptr, row, HAS_NUM_ROWS)
    if slot < 0:
        return
    is_greedy, is_filtered, scale = _wishes(floats_ptr, ints_ptr, slot, vocab_size)
    is_masked, is_penalised, num_ends, num_biases = _changes(ints_ptr, positions_ptr, slot, row, HAS_MASK)
    if is_masked | is_penalised | (num_ends > 0) | (num_biases > 0):
        changed_ptr = adjusted_ptr + row * adjusted_stride
        counted_ptr = counts_ptr + slot * counts_stride
        words_ptr = mask_ptr + row * mask_stride
        penalties = _penalties(floats_ptr, slot)
        dense = _change(values, ids, is_inside, counted_ptr, is_penalised, words_ptr, is_masked, penalties)
        tl.store(changed_ptr + ids, dense, mask=is_inside)
        # What follows overwrites single entries that other threads have just written.
        tl.debug_barrier()
        lanes = tl.arange(0, BIASES)
        biased = tl.load(bias_ids_ptr + slot * BIASES + lanes, mask=lanes < num_biases, other=-1)
        biases = tl.load(bias_values_ptr + slot * BIASES + lanes, mask=lanes < num_biases, other=0.0)
        is_here = (biased >= part * BLOCK) & (biased < (part + 1) * BLOCK) & (biased < vocab_size)
        single = tl.load(row_ptr + biased, mask=is_here, other=0.0) + biases
        single = _change(single, biased, is_here, counted_ptr, is_penalised, words_ptr, is_masked, penalties)
        tl.store(changed_ptr + biased, single, mask=is_here)
        tl.debug_barrier()
        lanes = tl.arange(0, ENDS)
        ends = tl.load(ends_ptr + slot * ENDS + lanes, mask=lanes < num_ends, other=-1)
        is_here = (ends >= part * BLOCK) & (ends < (part + 1) * BLOCK) & (ends < vocab_size)
        # An end id whose logit is no number must go on spoiling its row.
        is_number = tl.load(row_ptr + ends, mask=is_here, other=float("inf")) < float("inf")
        tl.store(changed_ptr + ends, tl.full((ENDS,), float("-inf"), tl.float32), mask=is_here & is_number)
        tl.debug_barrier()
        values = tl.load(changed_ptr + ids, mask=is_inside, other=float("-inf"))
    if PDL:
        gdc_launch_dependents()
    values = tl.where(values < float("inf"), values, float("inf"))
    top = tl.max(values, axis=0)
    scores = values
    if (is_greedy == 0) & (is_filtered == 0):
        first, second = _keys(ints_ptr, positions_ptr, slot, row)
        scores = values * scale + _noise(ids, first, second)
    best, place = tl.max(scores, axis=0, return_indices=True)
    if is_filtered:
        is_finite = (top > float("-inf")) & (top < float("inf"))
        best = tl.sum(tl.exp2((values - tl.where(is_finite, top, 0.0)) * scale), axis=0)
    at = row * parts_stride + part
    tl.store(scores_ptr + at, best)
    tl.store(ids_ptr + at, part * BLOCK + place)
    tl.store(tops_ptr + at, top)


@triton.jit
def _decide(
    logits_ptr, logits_stride, vocab_size,
    slots_ptr, positions_ptr, num_rows_ptr,
    floats_ptr, ints_ptr, counts_ptr, counts_stride,
    adjusted_ptr, adjusted_stride,
    scores_ptr, ids_ptr, tops_ptr, parts_stride,
    near_ids_ptr, near_values_ptr, tokens_ptr, num_parts,
    HAS_MASK: tl.constexpr, HAS_NUM_ROWS: tl.constexpr, PDL: tl.constexpr, IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token of one row, and its entry among the counts."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
    slot = _slot(slots_ptr, num_rows_ptr, row, HAS_NUM_ROWS)
    if slot < 0:
        return
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    tops = tl.load(tops_ptr + row * parts_stride + parts, mask=is_part, other=float("-inf"))
    scores = tl.load(scores_ptr + row * parts_stride + parts, mask=is_part, other=float("-inf"))
    ids = tl.load(ids_ptr + row * parts_stride + parts, mask=is_part, other=0)
    top = tl.max(tops, axis=0)
    place = tl.argmax(scores, axis=0)
    token = tl.sum(tl.where(parts == place, ids, 0), axis=0)
    _, is_filtered, scale = _wishes(floats_ptr, ints_ptr, slot, vocab_size)
    is_masked, is_penalised, num_ends, num_biases = _changes(ints_ptr, positions_ptr, slot, row, HAS_MASK)
    is_good = (top > float("-inf")) & (top < float("inf"))
    if is_filtered & is_good:
        is_changed = is_masked | is_penalised | (num_ends > 0) | (num_biases > 0)
        # Triton cannot choose between pointers, but between addresses.
        plain = (logits_ptr + row * logits_stride).to(tl.int64, bitcast=True)
        changed = (adjusted_ptr + row * adjusted_stride).to(tl.int64, bitcast=True)
        row_ptr = tl.where(is_changed, changed, plain).to(tl.pointer_type(tl.float32), bitcast=True)
        if IS_ALIGNED:
            row_ptr = tl.multiple_of(row_ptr, 16)
        top = tl.where(top == 0, 0.0, top)  # no negative zero among the edges
        top_p = tl.load(floats_ptr + slot * FIELDS + 1)
        min_p = tl.load(floats_ptr + slot * FIELDS + 2)
        top_k = tl.load(ints_ptr + slot * FIELDS)
        first, second = _keys(ints_ptr, positions_ptr, slot, row)
        near_ids_ptr += row * CANDIDATES
        near_values_ptr += row * CANDIDATES
        mass = tl.sum(tl.where(is_part, scores, 0.0) * tl.exp2((tops - top) * scale), axis=0)
        floor, num_near = _shortlist(
            row_ptr, vocab_size, tops, num_parts, ids_ptr + row * parts_stride, top, scale, top_k, top_p, min_p, mass,
            near_ids_ptr, near_values_ptr, PARTS, BLOCK,
        )  # fmt: skip
        token = _draw(
            row_ptr, vocab_size, top, scale, top_k, top_p, min_p, first, second, mass, floor, num_near,
            near_ids_ptr, near_values_ptr, TILE,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.where(is_good, token, -1)
    tl.store(tokens_ptr + row, token)
    if is_penalised & is_good:
        count_ptr = counts_ptr + slot * counts_stride + token
        count = tl.load(count_ptr).to(tl.int32)
        tl.store(count_ptr, (count + ((count & GENERATED) < GENERATED).to(tl.int32)).to(tl.int16))


@triton.jit
def _slot(slots_ptr, num_rows_ptr, row, HAS_NUM_ROWS: tl.constexpr):
    """The row's slot, negative if the row is to be skipped."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if HAS_NUM_ROWS:
        slot = tl.where(row < tl.load(num_rows_ptr), slot, -1)
    return slot


@triton.jit
def _wishes(floats_ptr, ints_ptr, slot, vocab_size):
    """How the row is drawn: greedy or not, filtered or not, the factor on its logits."""
    temperature = tl.load(floats_ptr + slot * FIELDS)
    top_p = tl.load(floats_ptr + slot * FIELDS + 1)
    min_p = tl.load(floats_ptr + slot * FIELDS + 2)
    top_k = tl.load(ints_ptr + slot * FIELDS)
    is_greedy = (temperature == 0) | (top_k == 1)
    is_filtered = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    scale = tl.math.div_rn(tl.zeros_like(temperature) + LOG2_E, tl.where(is_greedy, 1.0, temperature))
    return is_greedy, is_filtered & (is_greedy == 0), scale


@triton.jit
def _keys(ints_ptr, positions_ptr, slot, row):
    """The two keys of the row's noise."""
    ints = ints_ptr + slot * FIELDS
    low = _word(tl.load(ints + 1))
    high = _word(tl.load(ints + 2))
    index = _word(tl.load(positions_ptr + row) - tl.load(ints + 3))
    first = _mix(_mix(_mix(low ^ 0x2545F491) ^ high) ^ index)
    second = _mix(_mix(_mix(high ^ 0x68E31DA4) + low) + index)
    return first, second


@triton.jit
def _changes(ints_ptr, positions_ptr, slot, row, HAS_MASK: tl.constexpr):
    """What changes the row's logits: mask, penalties, how many ends are held back, how many biases there are."""
    ints = ints_ptr + slot * FIELDS
    flags = tl.load(ints + 7)
    is_held = tl.load(positions_ptr + row) - tl.load(ints + 3) < tl.load(ints + 4)
    is_masked = HAS_MASK & ((flags & MASKED) != 0)
    return is_masked, (flags & PENALISED) != 0, tl.where(is_held, tl.load(ints + 5), 0), tl.load(ints + 6)


@triton.jit
def _penalties(floats_ptr, slot):
    floats = floats_ptr + slot * FIELDS
    return tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5)


@triton.jit
def _change(values, ids, is_inside, counts_ptr, is_penalised, words_ptr, is_masked, penalties):
    """Penalties and mask on logits that have their bias."""
    counts = tl.load(counts_ptr + ids, mask=is_inside & is_penalised, other=0).to(tl.int32)
    repetition = tl.where(is_penalised, penalties[0], 1.0)
    reduced = tl.where(values > 0, tl.math.div_rn(values, repetition + tl.zeros_like(values)), values * repetition)
    generated = (counts & GENERATED).to(tl.float32)
    values = tl.where(counts != 0, reduced, values)
    values = values - penalties[1] * generated - penalties[2] * tl.minimum(generated, 1.0)
    words = tl.load(words_ptr + ids // 32, mask=is_inside & is_masked, other=-1)
    is_allowed = ((words >> (ids % 32)) & 1) != 0
    # What is no number stays, so that its row fails.
    return tl.where(is_allowed | ((values < float("inf")) == 0), values, float("-inf"))


@triton.jit
def _word(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _mix(bits):
    """A permutation of 32-bit words."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _noise(ids, first, second):
    """Minus the base-2 logarithm of a standard exponential a token; see the reference for the hash."""
    bits = ids.to(tl.uint32) * 0x9E3779B1 + first
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15) ^ second
    bits = bits * 0x846CA68B
    bits = bits ^ (bits >> 16)
    point = tl.minimum(
        bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.999999940395355224609375
    )
    series = point * (1 + point * (0.5 + point * (0.3333333333333333 + point * 0.25)))
    wait = tl.where(point < 0.01, series, tl.log2(1 - point) * -0.6931471805599453)
    return -tl.log2(wait)


@triton.jit
def _is_kept(values, ids, edge, last_id):
    """Of the tokens at the edge itself those up to `last_id` stay."""
    return (values > edge) | ((values == edge) & (ids <= last_id))


@triton.jit
def _weigh(values, ids, edge, last_id, top, scale, by_mass):
    """What a kept token counts: its probability over that of the best, or one."""
    weights = tl.where(by_mass, tl.exp2((values - top) * scale), 1.0)
    return tl.where(_is_kept(values, ids, edge, last_id), weights, 0.0)


@triton.jit
def _key(value):
    """A whole number that is ordered as the float is; `_value` undoes it."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shortlist(
    row_ptr, vocab_size, tops, num_parts, live_ptr, top, scale, top_k, top_p, min_p, mass,
    near_ids_ptr, near_values_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the tokens from a floor up, in the order of their ids, out of the parts that have any.

    Returns the floor and how many they are; more than fit where the list lacks a token that the filters may leave.
    `live_ptr` is memory for the numbers of those parts.
    """
    by_count = (top_k > 0) & (top_k < vocab_size)
    # In bits below the best token. Where min-p alone cuts, the rounding of its own test is far less than what is added.
    depth = tl.where(top_p < 1, MASS_DEPTH, 0.001 - tl.log2(tl.maximum(min_p, FAINTEST)))
    floor = tl.maximum(top - tl.math.div_rn(tl.zeros_like(scale) + depth, scale), LOWEST)
    if by_count:
        # So many parts have a token from here up, and with it the row.
        low = _key(tl.full((), LOWEST, tl.float32))
        high = _key(top) + 1
        for _ in range(FLOOR_STEPS):
            middle = low + (high - low) // 2
            is_enough = tl.sum((tops >= _value(middle)).to(tl.int32), axis=0) >= tl.minimum(top_k, num_parts)
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        floor = _value(low)
    is_live = tops >= floor
    tl.debug_barrier()  # the memory may still be being read
    tl.store(live_ptr + tl.cumsum(is_live.to(tl.int32), axis=0) - 1, tl.arange(0, PARTS), mask=is_live)
    tl.debug_barrier()
    num_live = tl.sum(is_live.to(tl.int32), axis=0)
    num_near = tl.full((), 0, tl.int32)
    lanes = tl.arange(0, LIST_TILE)
    for start in tl.range(0, num_live, LIST_TILE // BLOCK):
        turns = start + lanes // BLOCK
        ids = tl.load(live_ptr + turns, mask=turns < num_live, other=PARTS) * BLOCK + lanes % BLOCK
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        num_near += _append(values, ids, values >= floor, num_near, near_ids_ptr, near_values_ptr)
    tl.debug_barrier()
    values, ids = _near(near_ids_ptr, near_values_ptr, num_near)
    held = tl.sum(tl.exp2((values - top) * scale), axis=0)
    has_all = tl.where(by_count, (num_near >= top_k) | (floor <= LOWEST), (top_p >= 1) | (held >= top_p * mass))
    return floor, tl.where(has_all, num_near, CANDIDATES + 1)


@triton.jit
def _draw(
    row_ptr, vocab_size, top, scale, top_k, top_p, min_p, first, second, mass, floor, num_near,
    near_ids_ptr, near_values_ptr, TILE: tl.constexpr,
):  # fmt: skip
    """The race's winner among what the filters leave of one row of the given mass.

    The list in `near_*` holds the tokens near the edge; it may hold all that are above it too (`has_all`), as it nearly
    always does from the start, and is then all that is looked at from there on.
    """
    edge = tl.full((), float("-inf"), tl.float32)  # everything finite is kept
    last_id = tl.full((), -1, tl.int32)
    by_count = (top_k > 0) & (top_k < vocab_size)
    has_all = (num_near <= CANDIDATES).to(tl.int32)
    floor = tl.where(has_all != 0, floor, LOWEST)
    for phase in range(2):
        by_mass = phase == 1
        is_active = tl.where(by_mass, top_p < 1, by_count)
        if is_active:
            target = tl.where(by_mass, top_p, top_k.to(tl.float32))
            low = _key(tl.maximum(edge, floor))
            high = _key(top) + 1
            base = tl.full((), 0.0, tl.float32)
            if has_all == 0:
                low, high, base, target, most = _narrow(
                    row_ptr, vocab_size, edge, last_id, top, scale, by_mass, target, TILE
                )
                # No token weighs more than one, so where the target is larger the list cannot hold all.
                num_near = tl.full((), CANDIDATES + 1, tl.int32)
                if target <= CANDIDATES:
                    num_near = _gather(
                        row_ptr,
                        vocab_size,
                        edge,
                        last_id,
                        _value(low),
                        float("inf"),
                        near_ids_ptr,
                        near_values_ptr,
                        TILE,
                    )
                if num_near <= CANDIDATES:
                    has_all = tl.full((), 1, tl.int32)
                    base = tl.full((), 0.0, tl.float32)
                elif most <= CANDIDATES:
                    num_near = _gather(
                        row_ptr,
                        vocab_size,
                        edge,
                        last_id,
                        _value(low),
                        _value(high),
                        near_ids_ptr,
                        near_values_ptr,
                        TILE,
                    )
            elif by_mass:
                values, ids = _near(near_ids_ptr, near_values_ptr, num_near)
                left = tl.sum(_weigh(values, ids, edge, last_id, top, scale, by_mass), axis=0)
                target = target * tl.where(by_count, left, mass)
            if num_near <= CANDIDATES:
                edge, last_id = _find(
                    near_ids_ptr, near_values_ptr, num_near, edge, last_id, top, scale, by_mass, low, high, base, target
                )
            else:
                # More tokens than fit share one value: the edge is known, the last of them by id is not.
                weight = tl.where(by_mass, tl.exp2((_value(low) - top) * scale), 1.0)
                num_ties = _num_ties(target - base, weight, vocab_size)
                last_id = _last_tie(row_ptr, vocab_size, edge, last_id, _value(low), num_ties, TILE)
                edge = _value(low)
    if has_all != 0:
        values, ids = _near(near_ids_ptr, near_values_ptr, num_near)
        scores = _race(values, ids, edge, last_id, top, scale, min_p, first, second)
        token = _first_of_best(scores, ids, vocab_size)
    else:
        token = _race_row(row_ptr, vocab_size, edge, last_id, top, scale, min_p, first, second, TILE)
    return token


@triton.jit
def _near(near_ids_ptr, near_values_ptr, num_near):
    lanes = tl.arange(0, CANDIDATES)
    values = tl.load(near_values_ptr + lanes, mask=lanes < num_near, other=float("-inf"))
    return values, tl.load(near_ids_ptr + lanes, mask=lanes < num_near, other=0)


@triton.jit
def _narrow(row_ptr, vocab_size, edge, last_id, top, scale, by_mass, wanted, TILE: tl.constexpr):
    """A range of keys that holds the new edge, and few tokens: at most `most`, unless it is a single key.

    The kept tokens from `low` up weigh at least `target`, those from `high` up, `base`, do not. `wanted` is a number of
    tokens, or a share of the kept tokens' mass.
    """
    steps = tl.arange(0, PIVOTS)
    # Edges of real rows lie a few nats below the top; for masses those of the row after its temperature.
    unit = tl.where(by_mass, tl.math.div_rn(tl.zeros_like(scale) + LOG2_E, scale), 1.0)
    pivots = tl.maximum(top - unit * tl.exp2(0.585 * (steps * -1 + PIVOTS).to(tl.float32)), LOWEST)
    pivots = tl.where(steps == 0, LOWEST, pivots)
    low = _key(tl.full((), LOWEST, tl.float32))
    high = _key(top) + 1
    base = tl.full((), 0.0, tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    most = tl.full((), 0.0, tl.float32)
    target = wanted
    num_passes = tl.full((), 0, tl.int32)
    is_wide = tl.full((), 1, tl.int32)
    while is_wide != 0:
        sums = _tally(row_ptr, vocab_size, pivots, edge, last_id, top, scale, by_mass, TILE)
        if num_passes == 0:
            mass = tl.max(sums, axis=0)
            target = tl.where(by_mass, wanted * mass, tl.minimum(wanted, mass))
        is_enough = sums >= target
        keys = _key(pivots)
        low = tl.maximum(low, tl.max(tl.where(is_enough, keys, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_enough, high, keys), axis=0))
        mass = tl.minimum(mass, tl.min(tl.where(is_enough, sums, mass), axis=0))
        base = tl.maximum(base, tl.max(tl.where(is_enough, 0.0, sums), axis=0))
        num_passes += 1
        lightest = tl.where(by_mass, tl.exp2(tl.maximum(_value(low) - top, -1e30) * scale), 1.0)
        most = (mass - base) / tl.maximum(lightest, FAINTEST)
        is_wide = ((most > CANDIDATES) & (high - low > 1)).to(tl.int32)
        share = (steps + 1).to(tl.float32) / (PIVOTS + 1)
        by_value = _value(low) + (_value(high) - _value(low)) * share
        by_key = _value(low + (high - low) * (steps + 1) // (PIVOTS + 1))
        is_even = tl.where((_value(low) > -1e30) & (num_passes < MAX_VALUE_PASSES), 1, 0)
        pivots = tl.where((is_even != 0) & (by_value > _value(low)) & (by_value < _value(high)), by_value, by_key)
    return low, high, base, target, most


@triton.jit
def _tally(row_ptr, vocab_size, pivots, edge, last_id, top, scale, by_mass, TILE: tl.constexpr):
    """What the kept tokens from each pivot up weigh."""
    sums = tl.zeros((PIVOTS, TILE), tl.float32)
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = _weigh(values, ids, edge, last_id, top, scale, by_mass)
        sums += tl.where(values[None, :] >= pivots[:, None], weights[None, :], 0.0)
    return tl.sum(sums, axis=1)


@triton.jit
def _gather(
    row_ptr, vocab_size, edge, last_id, floor, ceiling, near_ids_ptr, near_values_ptr, TILE: tl.constexpr
):  # fmt: skip
    """Lists the kept tokens in [floor, ceiling) in the order of their ids; the first ones if they are too many.

    Returns how many they are.
    """
    num_found = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # an earlier list may still be being read
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_near = (values >= floor) & (values < ceiling) & _is_kept(values, ids, edge, last_id)
        num_found += _append(values, ids, is_near, num_found, near_ids_ptr, near_values_ptr)
    tl.debug_barrier()
    return num_found


@triton.jit
def _append(values, ids, is_near, num_found, near_ids_ptr, near_values_ptr):
    """Adds tokens to a list of `num_found`, as far as they fit; how many there were."""
    num_here = tl.sum(is_near.to(tl.int32), axis=0)
    if num_here > 0:
        places = num_found + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(near_ids_ptr + places, ids, mask=is_near & (places < CANDIDATES))
        tl.store(near_values_ptr + places, values, mask=is_near & (places < CANDIDATES))
    return num_here


@triton.jit
def _find(
    near_ids_ptr, near_values_ptr, num_near, edge, last_id, top, scale, by_mass, low, high, base, target
):  # fmt: skip
    """The new edge and the last id at it, by bisection among the listed tokens."""
    values, ids = _near(near_ids_ptr, near_values_ptr, num_near)
    weights = _weigh(values, ids, edge, last_id, top, scale, by_mass)
    while high - low > 1:
        middle = low + (high - low) // 2
        total = base + tl.sum(tl.where(values >= _value(middle), weights, 0.0), axis=0)
        low = tl.where(total >= target, middle, low)
        high = tl.where(total >= target, high, middle)
    found = _value(low)
    above = base + tl.sum(tl.where(values > found, weights, 0.0), axis=0)
    is_tie = (values == found) & _is_kept(values, ids, edge, last_id)
    weight = tl.where(by_mass, tl.exp2(tl.maximum(found - top, -1e30) * scale), 1.0)
    num_ties = _num_ties(target - above, weight, tl.sum(is_tie.to(tl.int32), axis=0))
    is_last = is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) == num_ties)
    return found, tl.max(tl.where(is_last, ids, -1), axis=0)


@triton.jit
def _num_ties(missing, weight, num_ties):
    """How many of the tokens at the edge make up what is missing; at least one."""
    needed = tl.ceil(missing / tl.maximum(weight, FAINTEST))
    return tl.maximum(tl.minimum(needed, num_ties), 1.0).to(tl.int32)


@triton.jit
def _last_tie(row_ptr, vocab_size, edge, last_id, found, num_ties, TILE: tl.constexpr):
    """The id of the `num_ties`-th kept token at the value `found`."""
    num_before = tl.full((), 0, tl.int32)
    result = tl.full((), -1, tl.int32)
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_tie = (values == found) & _is_kept(values, ids, edge, last_id)
        is_last = is_tie & (num_before + tl.cumsum(is_tie.to(tl.int32), axis=0) == num_ties)
        result = tl.maximum(result, tl.max(tl.where(is_last, ids, -1), axis=0))
        num_before += tl.sum(is_tie.to(tl.int32), axis=0)
    return result


@triton.jit
def _race(values, ids, edge, last_id, top, scale, min_p, first, second):
    is_running = _is_kept(values, ids, edge, last_id) & (tl.exp2((values - top) * scale) >= min_p)
    return tl.where(is_running, values * scale + _noise(ids, first, second), float("-inf"))


@triton.jit
def _race_row(row_ptr, vocab_size, edge, last_id, top, scale, min_p, first, second, TILE: tl.constexpr):
    """The race's winner over a whole row."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    winners = tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        scores = _race(values, ids, edge, last_id, top, scale, min_p, first, second)
        winners = tl.where(scores > best, ids, winners)
        best = tl.maximum(best, scores)
    return _first_of_best(best, winners, vocab_size)


@triton.jit
def _first_of_best(scores, ids, vocab_size):
    return tl.min(tl.where(scores == tl.max(scores, axis=0), ids, vocab_size - 1), axis=0)
