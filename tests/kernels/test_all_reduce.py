"""Sums over ranks that are processes, against plain torch; on a machine with one GPU they share it."""

from collections.abc import Iterator
from contextlib import closing
from itertools import product

import peer_ranks
import pytest
import torch
import triton
from peer_ranks import PeerRanks
from torch import Tensor

from sgray.kernels.all_reduce import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}


SIZES = (2, 3, 4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerRanks]:
    with closing(PeerRanks(max(SIZES), tmp_path_factory.mktemp("ranks"))) as made:
        yield made


def parts_of(size: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("kind", ["one_shot", "two_shot"])
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_references_sum_to_the_bit(ranks: PeerRanks, size: int, kind: str) -> None:
    for dtype, count in zip(DTYPES, (5003, 17, 1), strict=True):
        parts = parts_of(size, count, dtype=dtype)
        wanted = torch.full_like(parts[0], torch.nan)
        getattr(reference, kind)(parts[0], lambda _, parts=parts: parts, wanted)
        found = ranks.run(peer_ranks.reduced, size, parts, kind, count == 17)
        assert all(torch.equal(one, wanted) for one in found), (dtype, count)


@pytest.mark.parametrize("size", SIZES)
def test_the_norm_of_a_sum_that_ranks_share_is_the_references(ranks: PeerRanks, size: int) -> None:
    """Rows are also more than one, and more than two, for each program."""
    most = 9 if triton.knobs.runtime.interpret else 150
    for dtype, (rows, inputs) in zip(DTYPES, [(1, 64), (most, 37), (5, 576)], strict=True):
        parts = parts_of(size, rows, inputs, dtype=dtype)
        residual, weight = torch.randn(rows, inputs) * 3, torch.rand(inputs) + 0.5
        wanted, wanted_out = residual.clone(), torch.full((rows, inputs), torch.nan, dtype=dtype)
        reference.add_rms_norm(parts[0], lambda _, parts=parts: parts, wanted, weight, EPS, wanted_out)
        found = ranks.run(peer_ranks.normed, size, parts, residual, weight, EPS, dtype)
        for found_residual, out in found:
            assert torch.equal(found_residual, found[0][0]) and torch.equal(out, found[0][1])
            torch.testing.assert_close(found_residual, wanted, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(out, wanted_out, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_parts_lie_side_by_side_and_nothing_between_is_touched(ranks: PeerRanks, size: int) -> None:
    for dtype, (rows, columns) in product((torch.bfloat16, torch.int64), [(1, 1), (7, 301)]):
        parts = [(part * 100).to(dtype) for part in parts_of(size, rows, columns, dtype=torch.float32)]
        wanted = torch.zeros(rows, size, columns + 2, dtype=dtype)
        reference.all_gather(parts[0], lambda _, parts=parts: parts, wanted[:, :, 1:-1])
        assert all(torch.equal(one, wanted) for one in ranks.run(peer_ranks.gathered, size, parts))


@pytest.mark.parametrize("size, times", [(2, 100), (4, 20)])
def test_sums_one_after_the_other_do_not_disturb_each_other(ranks: PeerRanks, size: int, times: int) -> None:
    found = ranks.run(peer_ranks.many, size, times, 0.003)
    assert found == [[float(time * sum(range(1, size + 1))) for time in range(times)]] * size


def test_counts_of_meetings_may_run_over(ranks: PeerRanks) -> None:
    ranks.run(peer_ranks.counted_from, 2, 2**31 - 8)
    assert ranks.run(peer_ranks.many, 2, 12, 0.0) == [[float(time * 3) for time in range(12)]] * 2


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="graphs need a GPU")
@pytest.mark.parametrize("size", SIZES)
def test_a_captured_graph_sums_anew_at_every_replay(
    ranks: PeerRanks, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ranks.run(peer_ranks.replayed, size, 50)
    firsts = [sum(time % 16 + rank for rank in range(size)) for time in range(50)]
    assert [sums for sums, _ in found] == [[float(first * size * size) for first in firsts]] * size
    with capsys.disabled():
        print(f"\n{size} ranks: {max(each for _, each in found):.1f} us for a sum of 8 KiB in a graph")
