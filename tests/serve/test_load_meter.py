"""What autoscaling is told about one replica."""

from __future__ import annotations

import pytest

from sgray.protocol import EngineInfo, Load
from sgray.serve.autoscale import MEMORY_SHARE, ONGOING, PREFILL_SHARE, SEAT_SHARE, WAIT_S
from sgray.serve.load_meter import LoadMeter

INFO = EngineInfo("m", "", "A", "float32", "cpu", 100, 4096, (), page_size=16, num_pages=100, max_running_requests=8)


class Clock:
    """Time that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def mixed(num_prompt: int) -> int:
    """The prompt tokens of a step that also decodes."""
    return 64 if num_prompt < 1000 else 128


def test_an_idle_replica_has_no_load_at_all() -> None:
    signals = LoadMeter(INFO, mixed, clock=Clock()).read(Load(total_pages=100), 0)
    assert set(signals) == {ONGOING, WAIT_S, PREFILL_SHARE, MEMORY_SHARE, SEAT_SHARE}
    assert not any(signals.values())


def test_a_backlog_is_told_in_seconds_at_the_measured_speed() -> None:
    meter = LoadMeter(INFO, mixed, clock=Clock())
    assert meter.read(Load(waiting=1, waiting_tokens=500, prefill_tokens_per_s=250.0), 1)[WAIT_S] == 2.0


def test_decoding_beside_it_makes_a_backlog_last_longer() -> None:
    load = Load(running=4, waiting_tokens=640, prefill_tokens_per_s=640.0, decode_step_s=0.1)
    assert LoadMeter(INFO, mixed, clock=Clock()).read(load, 4)[WAIT_S] == pytest.approx(1.0 + 10 * 0.1)
    load = Load(running=4, waiting_tokens=1280, prefill_tokens_per_s=640.0, decode_step_s=0.1)
    assert LoadMeter(INFO, mixed, clock=Clock()).read(load, 4)[WAIT_S] == pytest.approx(2.0 + 10 * 0.1)


def test_before_anything_was_measured_a_backlog_still_counts() -> None:
    assert LoadMeter(INFO, mixed, clock=Clock()).read(Load(waiting_tokens=10_000), 5)[WAIT_S] > 0


def test_memory_is_what_running_requests_hold_and_waiting_ones_will_need_but_not_the_cache() -> None:
    meter = LoadMeter(INFO, mixed, clock=Clock())
    load = Load(total_pages=100, leased_pages=30, cached_pages=60, free_pages=10)
    assert meter.read(load, 1)[MEMORY_SHARE] == pytest.approx(0.3)
    load = Load(total_pages=100, leased_pages=30, cached_pages=70, waiting_tokens=160 * 16)
    assert meter.read(load, 1)[MEMORY_SHARE] == pytest.approx(1.9)


def test_seats_count_requests_that_wait_as_well() -> None:
    assert LoadMeter(INFO, mixed, clock=Clock()).read(Load(), 12)[SEAT_SHARE] == 1.5


@pytest.mark.parametrize("pace_s", [0.2, 1.0, 3.0])
def test_the_prefill_share_becomes_that_of_the_uncached_tokens_that_come(pace_s: float) -> None:
    clock = Clock()
    meter = LoadMeter(INFO, mixed, clock=clock)
    share = 0.0
    while clock.now < 60.0:
        clock.now += pace_s
        load = Load(prompt_tokens=int(900 * clock.now), cached_tokens=int(400 * clock.now), prefill_tokens_per_s=1000.0)
        share = meter.read(load, 0)[PREFILL_SHARE]
    assert share == pytest.approx(0.5, rel=0.02)
    for _ in range(100):
        clock.now += 1.0
        share = meter.read(load, 0)[PREFILL_SHARE]
    assert share == pytest.approx(0.0, abs=0.001)


def test_a_second_look_at_the_same_moment_changes_nothing() -> None:
    clock = Clock()
    meter = LoadMeter(INFO, mixed, clock=clock)
    clock.now = 1.0
    load = Load(prompt_tokens=100, prefill_tokens_per_s=100.0)
    assert meter.read(load, 1) == meter.read(load, 1)
