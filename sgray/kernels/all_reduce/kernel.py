"""Sums over ranks in Triton, over memory that every rank can reach. Knows nothing of how ranks find each other."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgray.kernels.all_reduce.peers import LINE_WORDS, Peers

# Two accesses of 16 bytes a thread where elements are halves: the fewest programs have then the fewest to wait for.
ONE_SHOT_BLOCK = 2048
MIN_SHARE = 512
NUM_WARPS = 4


def fits_one_shot(x: Tensor, peers: Peers) -> bool:
    """Whether the rooms hold it, for `one_shot` as for `all_gather`."""
    return peers.programs_for(x.numel(), ONE_SHOT_BLOCK)[1] * x.element_size() <= peers.room_bytes


def fits_two_shot(x: Tensor, peers: Peers) -> bool:
    """Whether the rooms hold it, and its sum's share beside it."""
    _, share = _shares(x, peers)
    return (peers.size + 1) * share * x.element_size() <= peers.room_bytes


def fits_add_rms_norm(x_TI: Tensor, peers: Peers) -> bool:
    """Whether the rooms hold its rows."""
    rows, inputs = x_TI.shape
    return -(-rows // peers.num_programs) * _pitch(inputs) * x_TI.element_size() <= peers.room_bytes


def one_shot(x: Tensor, peers: Peers, out: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out`."""
    assert fits_one_shot(x, peers), (x.shape, peers)
    programs, block = peers.programs_for(x.numel(), ONE_SHOT_BLOCK)
    _one_shot[(programs,)](
        x,
        out,
        peers.addresses_R,
        x.numel(),
        peers.rank,
        peers.room_bytes,
        peers.num_programs,
        RANKS=peers.size,
        LANES=_lanes(peers),
        BLOCK=block,
        PDL=pdl,
        num_warps=NUM_WARPS,
        **_launch(pdl),
    )


def two_shot(x: Tensor, peers: Peers, out: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out`."""
    assert fits_two_shot(x, peers), (x.shape, peers)
    programs, share = _shares(x, peers)
    _two_shot[(programs,)](
        x,
        out,
        peers.addresses_R,
        x.numel(),
        peers.rank,
        peers.room_bytes,
        peers.num_programs,
        RANKS=peers.size,
        LANES=_lanes(peers),
        SHARE=share,
        PDL=pdl,
        num_warps=NUM_WARPS,
        **_launch(pdl),
    )


def add_rms_norm(
    x_TI: Tensor,
    peers: Peers,
    residual_TI: Tensor,
    weight_I: Tensor,
    eps: float,
    out_TI: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """See the contract of this folder. Modifies `residual_TI` and `out_TI`."""
    assert fits_add_rms_norm(x_TI, peers), (x_TI.shape, peers)
    rows, inputs = x_TI.shape
    block = triton.next_power_of_2(inputs)
    _add_rms_norm[(min(rows, peers.num_programs),)](
        x_TI,
        residual_TI,
        weight_I,
        out_TI,
        peers.addresses_R,
        rows,
        eps,
        x_TI.stride(0),
        residual_TI.stride(0),
        out_TI.stride(0),
        peers.rank,
        peers.room_bytes,
        peers.num_programs,
        RANKS=peers.size,
        LANES=_lanes(peers),
        INPUTS=inputs,
        PITCH=_pitch(inputs),
        BLOCK=block,
        PDL=pdl,
        num_warps=num_warps_of(block),
        **_launch(pdl),
    )


def all_gather(x_TN: Tensor, peers: Peers, out_TRN: Tensor, *, pdl: bool = False) -> None:
    """See the contract of this folder. Modifies `out_TRN`."""
    assert fits_one_shot(x_TN, peers), (x_TN.shape, peers)
    programs, block = peers.programs_for(x_TN.numel(), ONE_SHOT_BLOCK)
    _all_gather[(programs,)](
        x_TN,
        out_TRN,
        peers.addresses_R,
        x_TN.numel(),
        x_TN.shape[1],
        x_TN.stride(0),
        out_TRN.stride(0),
        out_TRN.stride(1),
        peers.rank,
        peers.room_bytes,
        peers.num_programs,
        RANKS=peers.size,
        LANES=_lanes(peers),
        BLOCK=block,
        PDL=pdl,
        num_warps=NUM_WARPS,
        **_launch(pdl),
    )


def num_warps_of(block: int) -> int:
    """As many as the norm of one rank has."""
    return min(max(block // 512, 1), 16)


def _shares(x: Tensor, peers: Peers) -> tuple[int, int]:
    """How many programs there are, and how many elements of each are a rank's share: a power of two."""
    programs, share = peers.programs_for(-(-x.numel() // peers.size), MIN_SHARE)
    return programs, share


def _pitch(inputs: int) -> int:
    """Elements from one row in a room to the next: 16 bytes, of any dtype, begin each."""
    return -(-inputs // 16) * 16


def _lanes(peers: Peers) -> int:
    return triton.next_power_of_2(peers.size)


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def _line(addresses, program, LINE: tl.constexpr):
    """Where the words of the program begin, in the memories at the addresses."""
    return (addresses + program * LINE * 4).to(tl.pointer_type(tl.int32))


@triton.jit
def _room(addresses_ptr, peer, program, number, num_programs, room_bytes, dtype: tl.constexpr, LINE: tl.constexpr):
    """One of the two rooms of the program, in the memory of that rank."""
    rooms = tl.load(addresses_ptr + peer) + num_programs * LINE * 4
    address = rooms + (program * 2 + number).to(tl.int64) * room_bytes
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 128)


@triton.jit
def _num_met(addresses_ptr, rank, program, LINE: tl.constexpr):
    """How often the program has met the others before this call, which may have run on another multiprocessor."""
    return tl.load(_line(tl.load(addresses_ptr + rank), program, LINE) + (LINE - 1), volatile=True)


@triton.jit
def _remember(addresses_ptr, rank, program, count, LINE: tl.constexpr):
    """Written by the last instruction of a call and read by the next call."""
    tl.store(_line(tl.load(addresses_ptr + rank), program, LINE) + (LINE - 1), count)


@triton.jit
def _meet(addresses_ptr, rank, program, count, RANKS: tl.constexpr, LANES: tl.constexpr, LINE: tl.constexpr):
    """Tells the program of this number on every rank that this one has met `count` times, and waits to hear so.

    What the ranks have written before is seen by all after it. Each word has one writer, counts only grow, and nobody
    sets them back, so a word that has already been overwritten by the next count says what was waited for, and a
    difference is right when counts have run over. One thread a rank tells and listens. Its release covers what the
    other threads have written, because they come through the barrier first; its acquire what they read, because they
    leave by the other one.
    """
    tl.debug_barrier()
    lanes = tl.arange(0, LANES)
    is_rank = lanes < RANKS
    lines = _line(tl.load(addresses_ptr + lanes, mask=is_rank, other=0), program, LINE)
    tl.atomic_xchg(lines + rank, count, mask=is_rank, sem="release", scope="sys")
    own = _line(tl.load(addresses_ptr + rank), program, LINE) + lanes
    behind = tl.full((), -1, tl.int32)
    while behind < 0:
        heard = tl.atomic_add(own, tl.zeros_like(lanes), mask=is_rank, sem="acquire", scope="sys")
        behind = tl.min(tl.where(is_rank, heard - count, 0), 0)
    tl.debug_barrier()


@triton.jit
def _one_shot(
    x_ptr,
    out_ptr,
    addresses_ptr,
    size,
    rank,
    room_bytes,
    num_programs,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    LINE: tl.constexpr = LINE_WORDS,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    places = tl.arange(0, BLOCK)
    offsets = program * BLOCK + places
    mask = offsets < size
    if PDL:
        gdc_wait()
    met = _num_met(addresses_ptr, rank, program, LINE)
    number = (met // 2) & 1
    own = _room(addresses_ptr, rank, program, number, num_programs, room_bytes, dtype, LINE)
    tl.store(own + places, tl.load(x_ptr + offsets, mask=mask), mask=mask)
    _meet(addresses_ptr, rank, program, met + 2, RANKS, LANES, LINE)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        room = _room(addresses_ptr, peer, program, number, num_programs, room_bytes, dtype, LINE)
        total += tl.load(room + places, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(out_ptr + offsets, total.to(dtype), mask=mask)
    _remember(addresses_ptr, rank, program, met + 2, LINE)


@triton.jit
def _two_shot(
    x_ptr,
    out_ptr,
    addresses_ptr,
    size,
    rank,
    room_bytes,
    num_programs,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
    LINE: tl.constexpr = LINE_WORDS,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    places = tl.arange(0, SHARE)
    offsets = program * (RANKS * SHARE) + places
    if PDL:
        gdc_wait()
    met = _num_met(addresses_ptr, rank, program, LINE)
    number = (met // 2) & 1
    own = _room(addresses_ptr, rank, program, number, num_programs, room_bytes, dtype, LINE) + places
    for share in tl.static_range(RANKS):
        mask = offsets + share * SHARE < size
        tl.store(own + share * SHARE, tl.load(x_ptr + offsets + share * SHARE, mask=mask), mask=mask)
    _meet(addresses_ptr, rank, program, met + 1, RANKS, LANES, LINE)
    mask = offsets + rank * SHARE < size
    total = tl.zeros((SHARE,), tl.float32)
    for peer in tl.static_range(RANKS):
        room = _room(addresses_ptr, peer, program, number, num_programs, room_bytes, dtype, LINE)
        total += tl.load(room + rank * SHARE + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(own + RANKS * SHARE, total.to(dtype), mask=mask)
    _meet(addresses_ptr, rank, program, met + 2, RANKS, LANES, LINE)
    if PDL:
        gdc_launch_dependents()
    for peer in tl.static_range(RANKS):
        mask = offsets + peer * SHARE < size
        room = _room(addresses_ptr, peer, program, number, num_programs, room_bytes, dtype, LINE)
        tl.store(out_ptr + offsets + peer * SHARE, tl.load(room + RANKS * SHARE + places, mask=mask), mask=mask)
    _remember(addresses_ptr, rank, program, met + 2, LINE)


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    addresses_ptr,
    rows,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    rank,
    room_bytes,
    num_programs,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    INPUTS: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    LINE: tl.constexpr = LINE_WORDS,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    mask = columns < INPUTS
    weights = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    met = _num_met(addresses_ptr, rank, program, LINE)
    number = (met // 2) & 1
    own = _room(addresses_ptr, rank, program, number, num_programs, room_bytes, dtype, LINE) + columns
    # Rows that fit in the rooms are too few for an offset to need more than 32 bits.
    for row in tl.range(program, rows, num_programs):
        part = tl.load(x_ptr + row * x_stride + columns, mask=mask)
        tl.store(own + (row // num_programs) * PITCH, part, mask=mask)
    _meet(addresses_ptr, rank, program, met + 2, RANKS, LANES, LINE)
    for row in tl.range(program, rows, num_programs):
        place = (row // num_programs) * PITCH
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(RANKS):
            room = _room(addresses_ptr, peer, program, number, num_programs, room_bytes, dtype, LINE)
            total += tl.load(room + place + columns, mask=mask, other=0.0).to(tl.float32)
        residuals = residual_ptr + row * residual_stride + columns
        x = tl.load(residuals, mask=mask, other=0.0) + total
        tl.store(residuals, x, mask=mask)
        scale = tl.rsqrt(tl.sum(x * x, 0) / INPUTS + eps)
        y = x * scale * weights
        outs = out_ptr + row * out_stride + columns
        tl.store(outs, y.to(out_ptr.dtype.element_ty), mask=mask)
    if PDL:
        gdc_launch_dependents()
    _remember(addresses_ptr, rank, program, met + 2, LINE)


@triton.jit
def _all_gather(
    x_ptr,
    out_ptr,
    addresses_ptr,
    size,
    columns,
    x_stride,
    row_stride,
    rank_stride,
    rank,
    room_bytes,
    num_programs,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    LINE: tl.constexpr = LINE_WORDS,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    places = tl.arange(0, BLOCK)
    offsets = program * BLOCK + places
    mask = offsets < size
    rows = (offsets // columns).to(tl.int64)
    insides = offsets % columns
    if PDL:
        gdc_wait()
    met = _num_met(addresses_ptr, rank, program, LINE)
    number = (met // 2) & 1
    own = _room(addresses_ptr, rank, program, number, num_programs, room_bytes, dtype, LINE)
    tl.store(own + places, tl.load(x_ptr + rows * x_stride + insides, mask=mask), mask=mask)
    _meet(addresses_ptr, rank, program, met + 2, RANKS, LANES, LINE)
    if PDL:
        gdc_launch_dependents()
    for peer in tl.static_range(RANKS):
        room = _room(addresses_ptr, peer, program, number, num_programs, room_bytes, dtype, LINE)
        outs = out_ptr + rows * row_stride + peer * rank_stride + insides
        tl.store(outs, tl.load(room + places, mask=mask), mask=mask)
    _remember(addresses_ptr, rank, program, met + 2, LINE)
