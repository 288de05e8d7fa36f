from __future__ import annotations

import math

import pytest
import torch

from sgray.kernels.ceiling import kernel, reference


@pytest.mark.parametrize(("size", "programs"), [(4096, 1), (3 * 5000, 3), (17 * 31, 17), (8192 * 2, 2)])
def test_each_stretch_is_summed_and_nothing_past_it_is_read(device: torch.device, size: int, programs: int) -> None:
    room = torch.full((size + 4096,), math.nan, device=device)
    values = room[:size]
    values.copy_(torch.randint(-8, 9, (size,)))  # whole numbers, whose sums are exact
    sums = torch.full((programs,), math.nan, device=device)
    kernel.read_sum(values, sums)
    length = size // programs
    expected = [sum(values[number * length : (number + 1) * length].tolist()) for number in range(programs)]
    assert sums.tolist() == expected
    reference.read_sum(values, sums.fill_(math.nan))
    assert sums.tolist() == expected
