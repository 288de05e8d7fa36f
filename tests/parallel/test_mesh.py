"""How parameters are cut."""

from __future__ import annotations

import itertools

import pytest

from sgray.errors import ConfigError
from sgray.parallel.mesh import Member, Mesh, Split, Spread, Whole, check_rules


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
def test_parts_lie_side_by_side_and_cover_everything(tp_size: int) -> None:
    rule = Split(6, "heads")
    parts = [rule.part(Mesh(rank, tp_size), 48) for rank in range(tp_size)]
    assert parts[0][0] == 0 and parts[-1][1] == 48
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    assert len({stop - start for start, stop in parts}) == 1


def test_ranks_beyond_the_units_share_them() -> None:
    rule = Split(2, "key-value heads", shared=True)
    assert [rule.part(Mesh(rank, 4), 16) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]


def test_whole_is_whole_on_every_rank() -> None:
    assert [Whole().part(Mesh(rank, 3), 10) for rank in range(3)] == [(0, 10)] * 3


def test_three_ranks_of_the_default_model_pub_125() -> None:
    last = Mesh(2, 3)
    assert Split(9, "query heads").part(last, 9) == (6, 9)
    assert Split(3, "key-value heads", shared=True).part(last, 3) == (2, 3)
    assert Split(1536, "MLP columns").part(last, 1536) == (1024, 1536)


@pytest.mark.parametrize("tp_size", [-1, 0, 2, 4, 5, 7, 12])
def test_uneven_sizes_are_refused_with_the_count_and_the_size(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"{tp_size} .*9 query heads.*Sizes that fit: 1, 3, 9"):
        check_rules([Split(9, "query heads"), Whole()], tp_size)


def test_every_reason_is_given() -> None:
    with pytest.raises(ConfigError, match=r"9 heads.*10 columns"):
        check_rules([Split(9, "heads"), Split(10, "columns")], 4)


def test_a_shared_unit_must_still_come_out_even() -> None:
    assert Split(3, "heads", shared=True).problem(6) is None
    assert Split(3, "heads", shared=True).problem(4) is not None
    assert Split(3, "heads").problem(6) is not None


@pytest.mark.parametrize(("length", "tp_size"), [(49155, 4), (103, 2), (8, 4), (7, 1)])
def test_a_spread_covers_any_length_in_shares_that_differ_at_the_end_alone(length: int, tp_size: int) -> None:
    parts = [Spread().part(Mesh(rank, tp_size), length) for rank in range(tp_size)]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts)][:-1]
    assert parts[-1][1] == length
    share = Spread().share(Mesh(0, tp_size), length)
    assert {stop - start for start, stop in parts[:-1]} <= {share}
    assert 0 < parts[-1][1] - parts[-1][0] <= share


def test_ranks_hold_whole_units() -> None:
    assert [Split(9, "heads").held(Mesh(rank, 3)) for rank in range(3)] == [3, 3, 3]
    assert [Split(2, "heads", shared=True).held(Mesh(rank, 4)) for rank in range(4)] == [1, 1, 1, 1]


def test_a_member_is_whole_on_the_rank_that_holds_its_number_and_nowhere_else() -> None:
    experts = Split(6, "experts")
    for index in range(6):
        parts = [Member(experts, index).part(Mesh(rank, 3), 40) for rank in range(3)]
        assert parts == [(0, 40) if rank == index // 2 else (0, 0) for rank in range(3)]
    assert Member(experts, 0).problem(4) == "6 experts cannot be shared evenly by 4 ranks"
    assert Member(experts, 0).problem(3) is None


def test_ranks_fill_node_after_node_and_count_anew_on_each() -> None:
    meshes = [Mesh(rank, 6, 2) for rank in range(6)]
    assert [mesh.local_rank for mesh in meshes] == [0, 1, 2, 0, 1, 2]
    assert {mesh.ranks_per_node for mesh in meshes} == {3}
    assert Mesh(5, 6).local_rank == 5
