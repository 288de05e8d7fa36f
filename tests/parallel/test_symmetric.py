"""Ranks that reach each other's memory sum and gather tensors of any size."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with the extra `dev` on Linux")

import peer_ranks
from peer_ranks import PeerRanks

LIMITS = {"one_shot": 1024, "two_shot": 8192}
SIZE = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerRanks]:
    with closing(PeerRanks(SIZE, tmp_path_factory.mktemp("ranks"))) as made:
        yield made


@pytest.mark.parametrize("has_gloo", [False, True], ids=["in-pieces", "with-gloo"])
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((1,), torch.float16),
        ((3, 5), torch.bfloat16),
        ((2, LIMITS["one_shot"] // 8), torch.float32),  # as much as one shot takes
        ((2, LIMITS["one_shot"] // 8 + 1), torch.float32),
        ((1, LIMITS["two_shot"] // 4 + 5), torch.float32),
    ],
    ids=str,
)
def test_a_tensor_of_any_size_is_summed_and_gathered(
    ranks: PeerRanks, tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype, has_gloo: bool
) -> None:
    parts = [(torch.arange(torch.Size(shape).numel()) % 50 + rank).view(shape).to(dtype) for rank in range(SIZE)]
    total = torch.stack(parts).sum(0)
    store = str(tmp_path / "store") if has_gloo else None
    for gathered, summed in ranks.run(peer_ranks.summed_and_gathered, SIZE, parts, LIMITS, store):
        assert torch.equal(gathered, torch.cat(parts, dim=-1))
        assert torch.equal(summed, total)
