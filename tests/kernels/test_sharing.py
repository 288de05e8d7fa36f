"""Shared spans become units as wide as a task."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sgray.kernels.batch import MAX_DEPTH, MAX_PLACE
from sgray.kernels.span_attention.sharing import SharedUnits, Spans, share

SIZES = {"tokens_per_task": 4, "max_units": 100, "max_read": 100}


def share_all(spans: Spans, lengths: list[int], **sizes: int) -> SharedUnits:
    return share(spans, [10 * index for index in range(len(lengths))], lengths, **(SIZES | sizes))


def test_readers_are_dealt_out_evenly() -> None:
    found = share_all([(0, 64, list(range(10)))], [1] * 10)
    assert found.units == [(0, 0, 64, 4), (40, 0, 64, 4), (80, 0, 64, 2)]
    assert share_all([(0, 64, list(range(9)))], [1] * 9).units == [(0, 0, 64, 3), (30, 0, 64, 3), (60, 0, 64, 3)]
    assert found.paths[5] == [MAX_PLACE + 1]
    assert found.tiles_saved == 7


def test_a_path_goes_on_where_it_ended() -> None:
    found = share_all([(0, 64, [0, 1, 2]), (64, 192, [0, 2]), (128, 192, [0, 1])], [1, 1, 1])
    assert found.units == [(0, 0, 64, 3), (0, 64, 192, 2)]
    assert found.paths == {0: [0, MAX_PLACE], 1: [1], 2: [2, MAX_PLACE + 1]}
    assert found.tiles_saved == 2 + 2


def test_who_is_alone_reads_for_itself() -> None:
    assert share_all([(0, 64, [0])], [1]) == SharedUnits()
    assert share_all([(0, 64, [0, 1])], [3, 3]).units == []
    assert share_all([(0, 64, [0, 1, 2])], [4, 2, 2]).units == [(10, 0, 64, 4)]


def test_long_sequences_take_no_part() -> None:
    assert share_all([(0, 64, [0, 1, 2])], [1, 5, 3]).units == [(0, 0, 64, 4)]


def test_paths_and_tables_are_bounded() -> None:
    spans = [(64 * step, 64 * step + 64, [0, 1]) for step in range(MAX_DEPTH + 2)]
    assert len(share_all(spans, [1, 1]).units) == MAX_DEPTH
    assert len(share_all(spans, [1, 1], max_units=2).units) == 2
    assert len(share_all(spans, [1, 1], max_read=5).units) == 2


def test_it_pays_where_enough_is_saved() -> None:
    found = share_all([(0, 640, [0, 1])], [1, 1])
    assert found.pays([640, 640])
    assert not found.pays([640, 64_000])
    assert not SharedUnits().pays([640, 640])


@pytest.mark.parametrize("seed", range(20))
def test_every_reader_has_a_place_of_its_own(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 1, 1, 2, 3, 9]) for _ in range(40)]
    spans, groups = [], [(0, list(range(40)))]
    while groups:
        begin, members = groups.pop()
        end = begin + 64 * draw.randint(1, 4)
        spans.append((begin, end, members))
        draw.shuffle(members)
        cut = draw.randint(0, len(members))
        groups += [(end, part) for part in (members[:cut], members[cut:]) if len(part) > 1 and end < 1000]
    found = share_all(spans, lengths, tokens_per_task=8)
    units, paths = np.zeros((100, 4), dtype=np.int32), np.zeros((MAX_DEPTH, 40), dtype=np.int32)
    found.write(units, paths)
    taken: dict[int, list[int]] = {number: [] for number in range(len(found.units))}
    for index in range(40):
        words = [int(word) for word in paths[:, index] if word >= 0]
        assert words == found.paths.get(index, [])
        position = 0
        for word in words:
            assert units[word // MAX_PLACE, 1] == position
            position = int(units[word // MAX_PLACE, 2])
            taken[word // MAX_PLACE] += range(word % MAX_PLACE, word % MAX_PLACE + lengths[index])
    assert [sorted(places) for places in taken.values()] == [list(range(unit[3])) for unit in found.units]
    assert sum(unit[3] for unit in found.units) <= 100
