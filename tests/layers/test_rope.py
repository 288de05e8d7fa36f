"""Frequencies by kind, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sgray.layers.rope import Rope, inverse_frequencies, rotate
from sgray.layers.scaling import RopeScaling

FACTORS = tuple(1.0 + 0.1 * index for index in range(32))
CASES = [
    (RopeScaling(1e4, 4096, "linear", factor=3.0), {"factor": 3.0}),
    (
        RopeScaling(1e4, 4096, "yarn", factor=4.0, original_length=1024),
        {"factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    (
        RopeScaling(5e5, 4096, "llama3", factor=8.0, original_length=512),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    ),
    (
        RopeScaling(
            1e4, 4096, "longrope", factor=4.0, original_length=1024, short_factor=FACTORS, long_factor=FACTORS[::-1]
        ),
        {
            "short_factor": FACTORS,
            "long_factor": FACTORS[::-1],
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
]


@pytest.mark.parametrize("scaling, values", CASES, ids=[scaling.kind for scaling, _ in CASES])
def test_frequencies_are_those_of_transformers(scaling: RopeScaling, values: dict) -> None:
    parameters = {"rope_type": scaling.kind, "rope_theta": scaling.theta, **values}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=4096, rope_parameters=parameters
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, None, seq_len=4096)
    frequencies, factor = inverse_frequencies(64, scaling)
    assert torch.equal(frequencies, expected)
    assert factor == pytest.approx(expected_factor)


def test_position_zero_is_not_rotated() -> None:
    rope = Rope(8, RopeScaling(1e4, 64), torch.float32, torch.device("cpu"))
    x = torch.randn(1, 3, 8)
    assert torch.equal(rotate(x, *rope.rotation(torch.tensor([0]))), x)


def test_only_distances_matter() -> None:
    rope = Rope(16, RopeScaling(1e4, 4096), torch.float32, torch.device("cpu"))
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(query_at: int, key_at: int) -> float:
        rotated = [rotate(x, *rope.rotation(torch.tensor([at]))) for x, at in ((query, query_at), (key, key_at))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-4)


def test_a_rotation_does_not_depend_on_the_place_in_the_batch() -> None:
    rope = Rope(80, RopeScaling(1e4, 4096), torch.float32, torch.device("cpu"))
    together = rope.rotation(torch.arange(4096))
    for position in (1, 77, 4095):
        for all_of_them, one in zip(together, rope.rotation(torch.tensor([position])), strict=True):
            assert torch.equal(all_of_them[position], one[0])
