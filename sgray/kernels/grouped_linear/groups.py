"""Which rows belong to which group, put in order on the device that knows it, which is asked for no number.

Shape letters: P rows, E groups, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sort_by_group(groups_P: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Row numbers by their group, (P,), and where each group begins among them, (E + 1,); the last is where all end.

    Rows of a group keep their order. Rows whose group is not in 0..E - 1 come before or after all groups.
    """
    sorted_P, order_P = torch.sort(groups_P, stable=True)
    edges = torch.arange(num_groups + 1, device=groups_P.device, dtype=groups_P.dtype)
    return order_P, torch.searchsorted(sorted_P, edges)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in the order of their groups, cut into blocks of `block_rows` that have one group each.

    `order_P` is the row at each place of that order. `blocks_3B` are, of each block, its group, its first place and the
    end of the group's places; a block that is not needed begins at its end. There are as many blocks as could be.
    """

    order_P: Tensor
    blocks_3B: Tensor
    block_rows: int

    @staticmethod
    def of(groups_P: Tensor, num_groups: int) -> Groups:
        """The order of rows whose groups are `groups_P`; rows whose group is not in 0..E - 1 are in no block."""
        num_rows = groups_P.shape[0]
        block_rows = rows_of_a_block(num_rows, num_groups)
        order_P, starts = sort_by_group(groups_P, num_groups)
        blocks_E = (starts.diff() + block_rows - 1) // block_rows
        ends_E = blocks_E.cumsum(0)
        most = min(num_rows, num_rows // block_rows + num_groups)
        numbers = torch.arange(most, device=groups_P.device)
        found = torch.searchsorted(ends_E, numbers, right=True)
        group = found.clamp(max=num_groups - 1)
        first = starts[group] + (numbers - ends_E[group] + blocks_E[group]) * block_rows
        last = torch.where(found < num_groups, starts[group + 1], first)
        return Groups(order_P, torch.stack((group, first, last)).int(), block_rows)


def rows_of_a_block(num_rows: int, num_groups: int) -> int:
    """As many as a group has if all have equally many, between what tensor cores want and what registers hold."""
    for block_rows in (16, 32, 64):
        if num_rows <= block_rows * num_groups:
            return block_rows
    return 128
