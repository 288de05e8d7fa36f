"""Measured speeds."""

import pytest

from sgray.engine.metrics import StepSpeed


def test_speeds_are_zero_until_known() -> None:
    speed = StepSpeed()
    assert (speed.decode_step_s, speed.prefill_tokens_per_s, speed.last_step_s) == (0, 0, 0)
    speed.record(0.0, 10, 0)
    assert speed.prefill_tokens_per_s == 0


def test_pure_steps_give_their_own_speed() -> None:
    speed = StepSpeed()
    for _ in range(10):
        speed.record(0.5, 100, 0)
        speed.record(0.01, 0, 3)
    assert speed.prefill_tokens_per_s == pytest.approx(200)
    assert speed.decode_step_s == pytest.approx(0.01)
    assert speed.last_step_s == 0.01


def test_a_mixed_step_counts_only_what_is_beyond_the_decode() -> None:
    speed = StepSpeed()
    speed.record(0.1, 0, 4)
    speed.record(0.3, 100, 4)
    assert speed.prefill_tokens_per_s == pytest.approx(500)


def test_a_change_of_speed_is_followed() -> None:
    speed = StepSpeed()
    for _ in range(100):
        speed.record(0.01, 0, 1)
    for _ in range(100):
        speed.record(0.02, 0, 1)
    assert speed.decode_step_s == pytest.approx(0.02, rel=0.01)
