"""Kernels that work row by row, products of few rows, sampling, and the two ceilings that all of it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.bench.kernel_rig import Rig, Row, Weight, largest_error
from sgray.bench.stopwatch import Call, Stopwatch
from sgray.errors import EngineError
from sgray.kernels.activation import kernel as activation
from sgray.kernels.activation import reference as activation_reference
from sgray.kernels.ceiling import kernel as ceiling
from sgray.kernels.norm import kernel as norm
from sgray.kernels.norm import reference as norm_reference
from sgray.kernels.rope_store import kernel as rope
from sgray.kernels.rope_store import reference as rope_reference
from sgray.kernels.sampling import kernel as sampling
from sgray.kernels.sampling import reference as sampling_reference
from sgray.kernels.sampling.state import SamplingState, describe, store
from sgray.kernels.small_linear import kernel as small
from sgray.kernels.small_linear import reference as small_reference
from sgray.memory.pool import KVPool, PoolShape
from sgray.protocol import SamplingParams

EPS = 1e-5
SUSTAINED_ROUNDS = 80
WISHES: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.8),
        "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    }
)


def read_gb_s(rig: Rig) -> float:
    """The fastest of a few ways to read much more than the L2 cache holds."""
    values = rig.random(rig.sizes.read_values, dtype=torch.float32)
    times = []
    for programs in rig.sizes.read_programs:
        sums = rig.empty(programs, dtype=torch.float32)
        times.append(rig.stopwatch.microseconds([partial(ceiling.read_sum, values, sums)]))
    return values.nbytes / min(times) / 1e3


def matmul_tflop_s(rig: Rig) -> float:
    """bfloat16 products of large squares one after the other, until power and heat have had their say."""
    size = rig.sizes.matmul
    left, right = rig.random(size, size), rig.random(size, size)
    stopwatch = Stopwatch(rig.device, rounds=SUSTAINED_ROUNDS)
    return 2 * size**3 / stopwatch.microseconds([partial(torch.mm, left, right)]) / 1e6


def rowwise(rig: Rig) -> list[Row]:
    """Norm, gate and rotation for several numbers of rows."""
    kinds: dict[str, Callable[[Rig, int], tuple[list[Call], float]]] = {
        "add_rms_norm": _norm_calls,
        "silu_mul": _gate_calls,
        "rope_store": _rope_calls,
    }
    rows: list[Row] = []
    for name, calls_of in kinds.items():
        for num_rows in rig.sizes.tokens:
            calls, num_bytes = calls_of(rig, num_rows)
            us = rig.stopwatch.microseconds(calls)
            rows.append({"case": f"{name}, {num_rows}", "us": us, "% of read": rig.share(num_bytes, us)})
    return rows


def _norm_calls(rig: Rig, num_rows: int) -> tuple[list[Call], float]:
    hidden = rig.sizes.hidden
    weight = torch.ones(hidden, device=rig.device)

    def make() -> tuple[Tensor, Tensor, Tensor]:
        residual = rig.random(num_rows, hidden, dtype=torch.float32)
        return residual, rig.random(num_rows, hidden), rig.empty(num_rows, hidden)

    num_bytes = num_rows * hidden * (4 + 4 + 2 + 2)
    return [
        partial(norm.add_rms_norm, residual, delta, weight, EPS, out, pdl=rig.pdl)
        for residual, delta, out in rig.sets(make, num_bytes)
    ], num_bytes


def _gate_calls(rig: Rig, num_rows: int) -> tuple[list[Call], float]:
    inner = rig.sizes.inner
    num_bytes = num_rows * inner * 3 * 2
    pairs = rig.sets(lambda: (rig.random(num_rows, 2 * inner), rig.empty(num_rows, inner)), num_bytes)
    return [partial(activation.silu_mul, gate_up, out, pdl=rig.pdl) for gate_up, out in pairs], num_bytes


def _rope_calls(rig: Rig, num_rows: int) -> tuple[list[Call], float]:
    sizes = rig.sizes
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    num_bytes = 2 * num_rows * heads * sizes.head_dim * 2
    store_rows = partial(rope.rope_store, num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads, pdl=rig.pdl)
    return [partial(store_rows, *one) for one in rope_sets(rig, num_rows)], num_bytes


def rope_sets(rig: Rig, num_rows: int) -> list[tuple[Tensor, ...]]:
    """Arguments of `rope_store` on the layers of one pool: qkv, query, keys, values, positions, locations, rotation."""
    sizes = rig.sizes
    width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    buffers = rig.sets(
        lambda: (rig.random(num_rows, width), rig.empty(num_rows, sizes.num_heads, sizes.head_dim)),
        2 * num_rows * width * 2,
    )
    num_pages = -(-num_rows // sizes.page_size)
    shape = PoolShape(len(buffers), sizes.page_size, sizes.num_kv_heads, sizes.head_dim, torch.bfloat16)
    pool = KVPool(num_pages, shape, rig.device)
    positions = rig.integers(range(num_rows))
    angles = torch.arange(num_rows, device=rig.device)[:, None] * torch.logspace(
        0, -4, sizes.head_dim // 2, device=rig.device
    )
    rotation = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return [
        (qkv, query, *layer, positions, positions, rotation)
        for (qkv, query), layer in zip(buffers, pool.layers, strict=True)
    ]


def linears(rig: Rig) -> list[Row]:
    """Few rows by each of the model's weights; the gated product's figure includes its gate, torch.mm's does not."""
    return [row for weight in rig.sizes.weights for row in _linear_rows(rig, weight)]


def _linear_rows(rig: Rig, weight: Weight) -> list[Row]:
    """A row for each number of rows."""

    def make() -> small.SmallWeight:
        return small.SmallWeight.of(rig.random(weight.outputs, weight.inputs).mul_(0.02), gated=weight.is_gated)

    kept = rig.sets(make, weight.outputs * weight.inputs * 2)
    return [_linear_row(rig, weight, kept, num_rows) for num_rows in rig.sizes.few_rows]


def _linear_row(rig: Rig, weight: Weight, kept: list[small.SmallWeight], num_rows: int) -> Row:
    x = rig.random(num_rows, weight.inputs)
    out = rig.empty(num_rows, weight.outputs // (2 if weight.is_gated else 1))
    wide = rig.empty(num_rows, weight.outputs)
    us = rig.stopwatch.microseconds([partial(small.linear, x, one, out, pdl=rig.pdl) for one in kept])
    mm_us = rig.stopwatch.microseconds([partial(torch.mm, x, one.weight_OI.T, out=wide) for one in kept])
    num_bytes = (weight.outputs * weight.inputs + num_rows * (weight.inputs + out.shape[1])) * 2
    return {
        "case": f"{weight.name}, {num_rows}",
        "us": us,
        "% of read": rig.share(num_bytes, us),
        "torch.mm us": mm_us,
        "torch.mm / us": mm_us / us,
        "is used": kept[0].is_worth(num_rows),
    }


def samples(rig: Rig) -> list[Row]:
    """One token a row, beside what torch makes of the same wishes with argmax, softmax and sort."""
    return [row for num_rows in rig.sizes.sampled_rows for row in _sample_rows(rig, num_rows)]


def _sample_rows(rig: Rig, num_rows: int) -> list[Row]:
    """A row for each kind of wishes."""
    vocab = rig.sizes.vocab
    num_bytes = num_rows * vocab * 4
    logits = rig.sets(lambda: rig.random(num_rows, vocab, dtype=torch.float32).mul_(3), num_bytes)
    rows: list[Row] = []
    for name, wishes in WISHES.items():
        us = rig.stopwatch.microseconds(sample_calls(rig, logits, wishes))
        torch_us = rig.microseconds_if_possible([partial(sample_by_sort, one, wishes) for one in logits])
        share = rig.share(num_bytes, us)
        rows.append({"case": f"{num_rows}, {name}", "us": us, "% of read": share, "torch us": torch_us})
    return rows


def sample_calls(rig: Rig, logits: list[Tensor], wishes: SamplingParams) -> list[Call]:
    """A call for each tensor of logits, with the same wishes in every slot."""
    num_rows = logits[0].shape[0]
    state = sampling_state(rig, num_rows, wishes)
    slots, positions = rig.integers(range(num_rows)), rig.integers([1] * num_rows)
    tokens = rig.integers([-2] * num_rows)
    return [partial(sampling.sample, one, slots, positions, state, tokens, pdl=rig.pdl) for one in logits]


def sampling_state(rig: Rig, num_slots: int, wishes: SamplingParams) -> SamplingState:
    """The same wishes in every slot, each with a seed of its own."""
    state = SamplingState.allocate(num_slots, rig.sizes.vocab, rig.device)
    descriptions = [describe(wishes, seed=slot, num_prompt=1, end_ids=(), tokens=[0]) for slot in range(num_slots)]
    store(state, descriptions, range(num_slots))
    return state


def sample_by_sort(logits_RV: Tensor, wishes: SamplingParams) -> Tensor:
    """The usual way: sort, cut, softmax, draw."""
    if wishes.temperature == 0:
        return logits_RV.argmax(dim=-1)
    scaled = logits_RV / wishes.temperature
    if wishes.top_k == 0 and wishes.top_p == 1.0:
        return _drawn(F.softmax(scaled, dim=-1))
    ordered, ids = scaled.sort(dim=-1, descending=True)
    ordered[:, wishes.top_k :] = -torch.inf
    shares = F.softmax(ordered, dim=-1)
    shares[shares.cumsum(dim=-1) - shares > wishes.top_p] = 0
    return ids.gather(1, _drawn(shares)[:, None]).flatten()


def _drawn(shares_RV: Tensor) -> Tensor:
    """An exponential race, which waits for nothing on the host."""
    return (shares_RV / torch.empty_like(shares_RV).exponential_()).argmax(dim=-1)


def check_norm(rig: Rig) -> float:
    residual = rig.random(17, rig.sizes.hidden, dtype=torch.float32)
    delta, weight = rig.random(17, rig.sizes.hidden), rig.random(rig.sizes.hidden, dtype=torch.float32)
    actual, expected = rig.empty(17, rig.sizes.hidden), rig.empty(17, rig.sizes.hidden)
    norm_reference.add_rms_norm(residual.clone(), delta, weight, EPS, expected)
    norm.add_rms_norm(residual, delta, weight, EPS, actual, pdl=rig.pdl)
    return largest_error(actual, expected)


def check_gate(rig: Rig) -> float:
    gate_up = rig.random(17, 2 * rig.sizes.inner)
    actual, expected = rig.empty(17, rig.sizes.inner), rig.empty(17, rig.sizes.inner)
    activation.silu_mul(gate_up, actual, pdl=rig.pdl)
    activation_reference.silu_mul(gate_up, expected)
    return largest_error(actual, expected)


def check_rope(rig: Rig) -> float:
    """Queries and keys; the pages are poisoned first."""
    arguments = rope_sets(rig, 17)[0]
    _, query, keys, _, _, locations, _ = arguments
    size, heads, kv_heads = rig.sizes.page_size, rig.sizes.num_heads, rig.sizes.num_kv_heads

    def results() -> Tensor:
        stored = keys[(locations // size).long(), (locations % size).long()]
        return torch.cat((query, stored), dim=1).clone()

    keys.fill_(torch.nan)
    rope.rope_store(*arguments, num_heads=heads, num_kv_heads=kv_heads, pdl=rig.pdl)
    actual = results()
    query.fill_(torch.nan)
    keys.fill_(torch.nan)
    rope_reference.rope_store(*arguments, num_heads=heads, num_kv_heads=kv_heads)
    return largest_error(actual, results())


def check_linear(rig: Rig) -> float:
    """One row and several, by a plain and by a gated weight."""
    errors = []
    for is_gated in (False, True):
        outputs = rig.sizes.hidden
        weight = small.SmallWeight.of(rig.random(outputs, rig.sizes.hidden).mul_(0.02), gated=is_gated)
        for num_rows in (1, 5):
            x = rig.random(num_rows, rig.sizes.hidden)
            actual = rig.empty(num_rows, outputs // (2 if is_gated else 1))
            expected = torch.empty_like(actual)
            small.linear(x, weight, actual, pdl=rig.pdl)
            small_reference.linear(x, weight, expected)
            errors.append(largest_error(actual, expected))
    return max(errors)


def check_sampling(rig: Rig) -> float:
    """Every token is the reference's, which draws from the same hashes; behind each row lies NaN."""
    logits = rig.empty(4, rig.sizes.vocab + 64, dtype=torch.float32)[:, : rig.sizes.vocab].normal_()
    slots, positions = rig.integers(range(4)), rig.integers([1, 2, 3, 4])
    for name, wishes in WISHES.items():
        state = sampling_state(rig, 4, wishes)
        actual, expected = rig.integers([-2] * 4), rig.integers([-3] * 4)
        sampling.sample(logits, slots, positions, state, actual, pdl=rig.pdl)
        sampling_reference.sample(logits, slots, positions, state, expected)
        if not torch.equal(actual, expected):
            raise EngineError(f"{name}: tokens {actual.tolist()} instead of {expected.tolist()}")
    return 0.0
