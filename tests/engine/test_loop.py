"""The engine's thread: its inbox, its reports, its health, and what cannot end it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fake_model import VOCAB_SIZE, FakeExecutor, solo

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.engine.loop import NUM_TIMED, EngineLoop
from sgray.engine.plan import StepResult
from sgray.errors import DeviceLostError
from sgray.protocol import Delta, EngineInfo, Request, SamplingParams, StepReport

INFO = EngineInfo("fake", "/", "Fake", "float32", "cpu", VOCAB_SIZE, 4096, (), 4, 512, 4)


def request(id: str, tokens: list[int], count: int = 5) -> Request:
    return Request(id, tokens, SamplingParams(temperature=0, max_new_tokens=count))


class GatedExecutor(FakeExecutor):
    """Steps only while its gate is open, and tells when one has begun."""

    def __init__(self, depth: int) -> None:
        super().__init__(INFO.num_pages, INFO.page_size, depth=depth)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def collect(self) -> StepResult:
        self.entered.set()
        assert self.gate.wait(10)
        return super().collect()


class Client:
    """A loop with what it published."""

    def __init__(self, *, depth: int = 0, **config: dict[str, object]) -> None:
        self.executor = GatedExecutor(depth)
        self.engine = Engine(self.executor, INFO, Config.parse(config))
        self.deltas: list[Delta] = []
        self.reports: list[StepReport] = []
        self.threads: set[str] = set()
        self.fail_publish = 0
        self.loop = EngineLoop(self.engine, self.publish)

    def publish(self, report: StepReport) -> None:
        self.threads.add(threading.current_thread().name)
        self.reports.append(report)
        self.deltas += report.deltas
        if self.fail_publish:
            self.fail_publish -= 1
            raise RuntimeError("the link is down")

    def tokens(self, id: str) -> list[int]:
        return [token for delta in list(self.deltas) if delta.id == id for token in delta.tokens]

    def finish(self, id: str) -> str | None:
        reasons = [delta.finish.reason for delta in list(self.deltas) if delta.id == id and delta.finish]
        assert len(reasons) <= 1, "a request ends once"
        return reasons[0] if reasons else None

    def wait(self, *ids: str) -> None:
        wait_until(lambda: all(self.finish(name) for name in ids))


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


@pytest.fixture(params=[0, 1])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(depth=request.param)
    client.loop.start()
    yield client
    client.executor.gate.set()
    client.loop.stop()


def test_requests_from_other_threads_are_answered_on_the_loops_thread(client: Client) -> None:
    def work(number: int) -> None:
        for turn in range(5):
            client.loop.submit(request(f"{number}-{turn}", [number, turn]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.wait(*(f"{number}-{turn}" for number in range(4) for turn in range(5)))
    for number in range(4):
        for turn in range(5):
            assert client.tokens(f"{number}-{turn}") == solo([number, turn], 5)
    assert client.threads == {"sgray-engine"}


def test_an_idle_loop_sleeps(client: Client) -> None:
    client.loop.submit(request("a", [1]))
    client.wait("a")
    wait_until(lambda: not client.loop.health().busy)
    steps, reports = len(client.executor.plans), len(client.reports)
    time.sleep(0.05)
    assert (len(client.executor.plans), len(client.reports)) == (steps, reports)


def test_a_refusal_is_a_delta_with_the_error_and_comes_before_the_next_step_ends(client: Client) -> None:
    client.loop.submit(request("long", [1], 200))
    wait_until(lambda: bool(client.tokens("long")))
    client.loop.submit(request("bad", [VOCAB_SIZE]))
    client.wait("bad")
    [delta] = [delta for delta in client.deltas if delta.id == "bad"]
    assert delta.finish is not None and delta.finish.error is not None
    assert (delta.finish.error.status, delta.finish.error.param) == (400, "prompt")
    client.wait("long")
    assert client.tokens("long") == solo([1], 200)


def test_a_malformed_request_is_refused_and_those_beside_it_are_served(client: Client) -> None:
    client.executor.gate.clear()
    client.loop.submit(request("a", [1]))
    client.executor.entered.wait(10)
    client.loop.submit(request("bad", ["x"]))  # type: ignore[list-item]
    client.loop.submit(request("b", [2]))
    client.executor.gate.set()
    client.wait("a", "bad", "b")
    assert (client.finish("bad"), client.finish("a"), client.finish("b")) == ("error", "length", "length")
    assert client.loop.health().alive


def test_an_abort_ends_a_request_within_a_step(client: Client) -> None:
    client.loop.submit(request("a", [1], 4000))
    wait_until(lambda: len(client.tokens("a")) > 3)
    client.loop.abort("a")
    client.wait("a")
    assert client.finish("a") == "abort" and len(client.tokens("a")) < 4000
    client.loop.abort("a")
    client.loop.abort("never heard of")
    client.loop.submit(request("b", [2]))
    client.wait("b")
    assert client.engine.current_load().aborted == 1


def test_submitting_does_not_wait_for_a_step(client: Client) -> None:
    client.executor.gate.clear()
    client.loop.submit(request("a", [1]))
    client.executor.entered.wait(10)
    begin = time.monotonic()
    client.loop.submit(request("b", [2]))
    client.loop.abort("a")
    health = client.loop.health()
    assert time.monotonic() - begin < 1
    assert health.busy and health.alive
    client.executor.gate.set()
    client.wait("a", "b")


def test_health_knows_how_long_slow_steps_take(client: Client) -> None:
    client.loop.submit(request("a", [1]))
    client.wait("a")
    wait_until(lambda: not client.loop.health().busy)
    assert 0 < client.loop.health().slow_step_s < 1
    for number in range(2 * NUM_TIMED):
        client.loop._time(0.1 if number % 50 else 3.0)
    assert client.loop.health().slow_step_s == 3.0
    for _ in range(NUM_TIMED):
        client.loop._time(0.1)
    assert client.loop.health().slow_step_s == 0.1, "what is long ago is forgotten"


def test_health_shows_a_stuck_step_and_an_idle_loop_is_not_stuck(client: Client) -> None:
    assert client.loop.health().busy is False
    client.executor.gate.clear()
    time.sleep(0.1)
    client.loop.submit(request("a", [1]))
    client.executor.entered.wait(10)
    assert client.loop.health().last_step_age_s < 0.1, "the age counts from when the work came"
    time.sleep(0.15)
    health = client.loop.health()
    assert health.busy and health.last_step_age_s >= 0.1
    client.executor.gate.set()
    client.wait("a")
    wait_until(lambda: not client.loop.health().busy)


def test_a_failing_step_answers_its_requests_and_shows_in_health_until_one_succeeds(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.executor.explode = 1
    with caplog.at_level(logging.ERROR):
        client.loop.submit(request("a", [1]))
        client.wait("a")
    assert client.finish("a") == "error"
    assert client.loop.health().error == "RuntimeError: the device fell off the bus"
    client.loop.submit(request("b", [2]))
    client.wait("b")
    assert client.tokens("b") == solo([2], 5)
    assert client.loop.health().error is None and client.loop.health().alive


def test_a_lost_device_stays_in_health(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> StepResult:
        monkeypatch.undo()
        raise DeviceLostError("an illegal memory access was encountered")

    assert not client.loop.health().is_lost
    monkeypatch.setattr(client.executor, "collect", lost)
    with caplog.at_level(logging.ERROR):
        client.loop.submit(request("a", [1]))
        client.wait("a")
    assert client.finish("a") == "error"
    client.loop.submit(request("b", [2]))
    client.wait("b")
    assert client.loop.health().is_lost


def test_what_is_lost_between_steps_is_in_health(client: Client) -> None:
    client.executor.lost = "rank 1 was killed by signal 9"
    health = client.loop.health()
    assert (health.is_lost, health.error) == (True, "rank 1 was killed by signal 9")


def test_a_loop_that_stops_closes_the_executor(client: Client) -> None:
    assert not client.executor.is_closed
    client.loop.stop()
    assert client.executor.is_closed


def test_a_fault_of_the_engine_itself_answers_everybody_and_does_not_end_the_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> StepReport:
        monkeypatch.undo()
        raise KeyError("a bug")

    client.executor.gate.clear()
    client.loop.submit(request("a", [1], 50))
    client.executor.entered.wait(10)
    client.loop.submit(request("b", [2], 50))
    monkeypatch.setattr(client.engine, "step", broken)
    with caplog.at_level(logging.ERROR):
        client.executor.gate.set()
        client.wait("a", "b")
    assert client.finish("a") == client.finish("b") == "error"
    client.loop.submit(request("c", [3]))
    client.wait("c")
    assert client.tokens("c") == solo([3], 5)
    assert "between steps" in caplog.text
    client.engine.check()


def test_a_publisher_that_fails_does_not_end_the_loop(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    client.fail_publish = 2
    with caplog.at_level(logging.ERROR):
        client.loop.submit(request("a", [1]))
        client.wait("a")
    assert "could not be published" in caplog.text and client.tokens("a") == solo([1], 5)


@pytest.mark.parametrize("depth", [0, 1])
def test_stopping_ends_the_thread_and_answers_what_is_unfinished(depth: int) -> None:
    client = Client(depth=depth)
    client.loop.start()
    client.loop.submit(request("a", [1], 4000))
    wait_until(lambda: bool(client.tokens("a")))
    client.loop.stop()
    assert client.finish("a") == "error" and not client.loop.health().alive
    assert not client.executor.submitted, "what was in flight is dropped"
    client.loop.submit(request("late", [1]))
    client.loop.abort("late")
    errors = [delta.finish.error for delta in client.deltas if delta.finish and delta.finish.error]
    assert [error.code for error in errors] == ["replica_lost", "replica_lost"]
    client.loop.stop()
    assert not client.loop.health().busy


def test_what_came_before_the_start_is_answered_also_when_it_never_starts() -> None:
    client = Client()
    client.loop.submit(request("a", [1]))
    assert client.loop.health().busy and not client.loop.health().alive
    client.loop.stop()
    assert client.finish("a") == "error"


def test_pub_106_twenty_at_once_are_all_answered(client: Client) -> None:
    small = Client(schedule={"max_queued_requests": 2})
    small.loop.start()
    for number in range(20):
        small.loop.submit(request(f"{number}", [number], 100))
    small.wait(*(f"{number}" for number in range(20)))
    reasons = [small.finish(f"{number}") for number in range(20)]
    assert reasons.count("length") >= INFO.max_running_requests and set(reasons) == {"length", "error"}
    small.loop.submit(request("after", [1]))
    small.wait("after")
    small.loop.stop()
    assert small.tokens("after") == solo([1], 5)


def test_a_flush_empties_the_cache_unless_requests_hold_it_and_is_told_after_its_report(client: Client) -> None:
    told: list[tuple[bool, bool]] = []

    def done(is_empty: bool) -> None:
        told.append((is_empty, any(event.kind == "cleared" for report in client.reports for event in report.events)))

    client.loop.submit(request("a", list(range(40))))
    client.wait("a")
    client.loop.flush(done)
    wait_until(lambda: bool(told))
    assert told == [(True, True)]
    assert client.engine.current_load().free_pages == INFO.num_pages
    client.loop.submit(request("long", [1], 200))
    wait_until(lambda: bool(client.tokens("long")))
    client.loop.flush(done)
    wait_until(lambda: len(told) == 2)
    assert told[1][0] is False
    client.wait("long")
    assert client.tokens("long") == solo([1], 200)
    client.engine.check()


def test_a_flush_that_comes_too_late_or_whose_asker_is_gone_harms_nobody(client: Client) -> None:
    def gone(is_empty: bool) -> None:
        raise RuntimeError("Event loop is closed")

    told: list[bool] = []
    client.loop.flush(gone)
    client.loop.submit(request("a", [1]))
    client.wait("a")
    client.loop.stop()
    client.loop.flush(told.append)
    assert told == [False]
