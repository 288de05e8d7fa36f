"""Ranks exchange tensors: each rank here is a thread with a group of its own."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sgray.parallel.comm import LOOPBACK, Comm, GlooComm, MeetingPlace, SingleRank, connect, least
from sgray.parallel.mesh import Mesh


def on_ranks(size: int, work: Callable[[Comm, int], Tensor], timeout_s: float = 20.0) -> list[Tensor]:
    """What each rank's work gives."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(GlooComm(Mesh(rank, size), store, timeout_s), rank), range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_gives_every_rank_the_same_sum(size: int) -> None:
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    sums = on_ranks(size, lambda comm, rank: comm.all_reduce(parts[rank].clone()))
    torch.testing.assert_close(sums[0], torch.stack(parts).sum(0))
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_lays_the_last_dimension_side_by_side(size: int) -> None:
    whole = torch.arange(4.0 * 6).view(4, 6)
    width = 6 // size
    found = on_ranks(size, lambda comm, rank: comm.all_gather(whole[:, rank * width : (rank + 1) * width]))
    assert all(torch.equal(one, whole) for one in found)


def test_a_sum_of_halves_is_not_rounded_on_its_way() -> None:
    parts = [torch.tensor([256.0, 1.0], dtype=torch.bfloat16), torch.tensor([1.0, 2.0**-8], dtype=torch.bfloat16)]
    sums = on_ranks(2, lambda comm, rank: comm.all_reduce(parts[rank].clone()))
    assert [one.tolist() for one in sums] == [[257.0, 1.00390625]] * 2


def test_the_least_of_what_ranks_bring_is_the_same_on_all() -> None:
    def work(comm: Comm, rank: int) -> Tensor:
        return torch.tensor(least(comm, [2**40, 7, 9][rank], torch.device("cpu")))

    assert [int(one) for one in on_ranks(3, work)] == [7, 7, 7]
    assert least(SingleRank(), 5, torch.device("cpu")) == 5


@pytest.mark.parametrize("make", [MeetingPlace.on_this_node, partial(MeetingPlace.at, LOOPBACK)], ids=["file", "store"])
def test_ranks_meet_at_a_place_that_may_go_when_they_have_met(
    make: Callable[[], MeetingPlace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    meeting = make()
    with ThreadPoolExecutor(2) as pool:
        comms = list(
            pool.map(lambda rank: connect(Mesh(rank, 2), meeting.place, LOOPBACK, torch.device("cpu")), range(2))
        )
        meeting.leave()
        assert not list(tmp_path.iterdir())
        sums = list(pool.map(lambda comm: comm.all_reduce(torch.ones(3)), comms))
        assert [one.tolist() for one in sums] == [[2.0] * 3] * 2
        del comms
    meeting.close()
    assert not list(tmp_path.iterdir())


def test_a_store_for_several_nodes_listens_on_its_address_alone() -> None:
    meeting = MeetingPlace.at("127.0.0.2")
    port = int(meeting.place.split()[-1])
    with closing(meeting):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_rank_that_falls_silent_is_an_error_on_the_others() -> None:
    def work(comm: Comm, rank: int) -> Tensor:
        return comm.all_reduce(torch.ones(2)) if rank == 0 else torch.zeros(2)

    with pytest.raises(RuntimeError):
        on_ranks(2, work, timeout_s=1.0)


def test_a_single_rank_pays_nothing() -> None:
    x = torch.ones(3)
    comm: Comm = SingleRank()
    assert comm.all_reduce(x) is x
    assert comm.all_gather(x) is x
