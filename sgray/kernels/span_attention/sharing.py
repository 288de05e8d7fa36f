"""Which keys of a step are read once for several sequences: from spans that sequences share to units of a task's width.

A node of the radix tree that several running sequences have in common is such a span; that decoding should read it once
for all of them is Hydragen's idea (Juravsky et al., 2024), for nested ones DeFT's (Yao et al., 2024). Knows lengths and
counts; where spans come from, and what is computed, is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sgray.kernels.batch import MAX_DEPTH, MAX_PLACE
from sgray.kernels.span_attention.work import TILE

Spans = Iterable[tuple[int, int, Sequence[int]]]
"""Positions `[begin, end)` and the sequences, by index in the batch, that have them in the same pages. A span stands
behind those that hold earlier positions of its sequences; `begin` and `end` are multiples of the page size."""


MIN_SHARE = 0.1
"""The part of a decode's tiles that must be saved: wide tasks compute more for each tile, and more rows are merged."""


@dataclass(frozen=True, slots=True)
class SharedUnits:
    """What `SharedTables` says, on the host. `tiles_saved`: tiles that are not read again for each sequence."""

    units: list[tuple[int, int, int, int]] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=dict)
    tiles_saved: int = 0

    def pays(self, starts: Sequence[int]) -> bool:
        """Whether a decode of sequences with so many keys is faster with these units than without any."""
        num_tiles = sum(start // TILE + 1 for start in starts)
        return self.tiles_saved > MIN_SHARE * num_tiles

    def write(self, units_U4: np.ndarray, paths_DB: np.ndarray) -> None:
        """Fills tables of `units_U4.shape[0]` units and `paths_DB.shape[1]` sequences."""
        if self.units:
            units_U4[: len(self.units)] = self.units
        paths_DB[:] = -1
        for index, path in self.paths.items():
            paths_DB[: len(path), index] = path


def share(
    spans: Spans, slots: Sequence[int], lengths: Sequence[int], *, tokens_per_task: int, max_units: int, max_read: int
) -> SharedUnits:
    """Units for the spans that at least two sequences with at most `tokens_per_task` tokens can read together.

    Tokens read units `max_read` times at most, each token counted once a unit.

    A sequence reads at most MAX_DEPTH units, without a gap from its first position on: where a span cannot be shared,
    nothing behind it is. Once `max_units` or `max_read` are reached, the rest is left to the sequences.
    """
    units: list[tuple[int, int, int, int]] = []
    paths: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    tiles_saved = num_read = 0
    widest = min(tokens_per_task, MAX_PLACE)
    for begin, end, members in spans:
        readers = [
            index
            for index in members
            if lengths[index] <= widest and ends.get(index, 0) == begin and len(paths.get(index, ())) < MAX_DEPTH
        ]
        for group in _groups(readers, lengths, widest):
            count = sum(lengths[index] for index in group)
            if len(units) == max_units or num_read + count > max_read:
                return SharedUnits(units, paths, tiles_saved)
            place = len(units) * MAX_PLACE
            for index in group:
                paths.setdefault(index, []).append(place)
                ends[index] = end
                place += lengths[index]
            units.append((slots[group[0]], begin, end, count))
            num_read += count
            tiles_saved += (len(group) - 1) * -(-(end - begin) // TILE)
    return SharedUnits(units, paths, tiles_saved)


def _groups(readers: list[int], lengths: Sequence[int], widest: int) -> list[list[int]]:
    """Readers of two or more to a group, with at most `widest` tokens in it, in groups as even as order allows."""
    total = sum(lengths[index] for index in readers)
    even = -(-total // max(-(-total // widest), 1))
    groups: list[list[int]] = []
    room = 0
    for index in readers:
        if lengths[index] > room:
            groups.append([])
            room = even if lengths[index] <= even else widest
        groups[-1].append(index)
        room -= lengths[index]
    return [group for group in groups if len(group) > 1]
