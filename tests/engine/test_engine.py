"""Scheduler and executor joined: reports, refusals, failing steps, repair."""

from __future__ import annotations

import logging

import pytest
from fake_model import VOCAB_SIZE, FakeExecutor, solo

from sgray.config import Config
from sgray.engine.engine import CHECK_PERIOD_S, Engine
from sgray.errors import EngineError, InvalidRequestError
from sgray.protocol import Delta, EngineInfo, Request, SamplingParams, page_hashes

INFO = EngineInfo(
    model_name="fake",
    model_dir="/",
    architecture="Fake",
    dtype="float32",
    device="cpu",
    vocab_size=VOCAB_SIZE,
    context_length=512,
    end_ids=(2,),
    page_size=4,
    num_pages=64,
    max_running_requests=4,
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=5)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class Bench:
    """An engine on the fake model, with what it told."""

    def __init__(self, **config: dict[str, object]) -> None:
        self.clock = Clock()
        self.executor = FakeExecutor(INFO.num_pages, INFO.page_size)
        self.engine = Engine(self.executor, INFO, Config.parse(config), clock=self.clock)
        self.deltas: list[Delta] = []
        self.hashes: set[int] = set()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def step(self) -> None:
        report = self.engine.step()
        self.deltas += report.deltas
        for event in report.events:
            self.hashes = {
                "stored": self.hashes | set(event.hashes),
                "removed": self.hashes - set(event.hashes),
                "cleared": set(),
            }[event.kind]

    def tokens(self, id: str) -> list[int]:
        return [token for delta in self.deltas if delta.id == id for token in delta.tokens]

    def reason(self, id: str) -> str | None:
        [finish] = [delta.finish for delta in self.deltas if delta.id == id and delta.finish]
        return finish.reason


def test_a_request_goes_in_and_its_tokens_come_out_with_events_and_load() -> None:
    bench = Bench()
    bench.engine.add(Request("a", [7] * 10, GREEDY))
    bench.run()
    assert bench.tokens("a") == solo([7] * 10, 5) and bench.reason("a") == "length"
    assert bench.hashes == set(page_hashes([7] * 10 + bench.tokens("a"), 4, _namespace())[:3])
    load = bench.engine.current_load()
    assert (load.generation_tokens, load.steps, load.running) == (5, 5, 0)
    assert load.last_step_s > 0
    bench.engine.check()


def _namespace() -> bytes:
    from sgray.protocol import namespace_key

    return namespace_key()


def test_nothing_to_do_is_a_report_without_a_step() -> None:
    bench = Bench()
    report = bench.engine.step()
    assert report.deltas == [] and report.load.steps == 0


def test_an_abort_is_told_without_a_step() -> None:
    bench = Bench()
    bench.engine.add(Request("a", [7] * 10, GREEDY))
    bench.engine.abort("a")
    report = bench.engine.report()
    assert [delta.id for delta in report.deltas] == ["a"] and not bench.engine.has_work
    assert bench.executor.plans == []


def test_ids_outside_the_vocabulary_are_refused() -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        bench.engine.add(Request("a", [VOCAB_SIZE], GREEDY))
    assert bench.engine.current_load().refused == 1


def test_the_limits_come_from_the_configuration_and_the_facts() -> None:
    bench = Bench(schedule={"chunked_prefill_size": 8})
    bench.engine.add(Request("a", [7] * 20, GREEDY))
    bench.run()
    assert [plan.lengths for plan in bench.executor.plans][:3] == [[8], [8], [4]]
    bench = Bench()
    bench.engine.add(Request("a", [7] * 200, GREEDY))
    bench.run()
    assert bench.executor.plans[0].lengths == [200], "auto is 512 on the CPU"


def test_a_disabled_cache_computes_every_prompt() -> None:
    bench = Bench(memory={"disable_radix_cache": True})
    for name in ("a", "b"):
        bench.engine.add(Request(name, [7] * 10, GREEDY))
        bench.run()
    assert [delta.cached_tokens for delta in bench.deltas if delta.cached_tokens is not None] == [0, 0]
    assert bench.hashes == set()


def test_a_failing_step_ends_its_sequences_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine.add(Request("a", [7] * 10, GREEDY))
    bench.step()
    bench.executor.explode = 1
    bench.engine.add(Request("b", [8] * 10, GREEDY))
    with caplog.at_level(logging.ERROR):
        bench.step()
    assert bench.engine.failure == "RuntimeError: the device fell off the bus"
    assert "step 2 failed" in caplog.text
    assert bench.reason("a") == bench.reason("b") == "error"
    bench.engine.check()
    bench.engine.add(Request("c", [7] * 10, GREEDY))
    bench.run()
    assert bench.engine.failure is None and bench.tokens("c") == solo([7] * 10, 5)
    errors = [delta.finish.error for delta in bench.deltas if delta.finish and delta.finish.error]
    assert {(error.status, error.code) for error in errors} == {(500, "engine_error")}
    assert all("bus" not in error.message for error in errors), "inner messages stay in the log"


def test_books_that_are_wrong_are_noticed_when_idle_and_repaired(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine.add(Request("a", [7] * 10, GREEDY))
    bench.run()
    bench.engine._cache._free.allocate(3)  # lose three pages
    with pytest.raises(AssertionError):
        bench.engine.check()
    bench.clock.now += CHECK_PERIOD_S
    bench.engine.add(Request("b", [8] * 10, GREEDY))
    with caplog.at_level(logging.ERROR):
        bench.run()
    assert "books are wrong" in caplog.text
    bench.engine.check()
    bench.step()
    assert bench.hashes == set() and bench.engine.current_load().free_pages == 64


def test_right_books_stay_as_they_are() -> None:
    bench = Bench()
    bench.clock.now += CHECK_PERIOD_S
    bench.engine.add(Request("a", [7] * 10, GREEDY))
    bench.run()
    assert bench.engine.current_load().cached_pages == 3


def test_everything_can_be_failed_even_when_the_books_are_wrong() -> None:
    bench = Bench()
    for name in "abcdef":
        bench.engine.add(Request(name, [7] * 10, GREEDY))
    bench.step()
    bench.engine._cache._free.allocate(3)
    bench.engine.fail_all(EngineError("reset"))
    bench.step()
    assert all(bench.reason(name) == "error" for name in "abcdef")
    bench.engine.check()
    bench.engine.add(Request("a", [7] * 10, GREEDY))
    bench.run()
    assert bench.tokens("a")[-5:] == solo([7] * 10, 5)
