"""One step in flight while the next is planned: what is known when, who owns what, and that nothing changes."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
from fake_model import VOCAB_SIZE, FakeExecutor, Rig, mix, solo
from twins import make_twin, some_tokens

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.engine.executor import load_executor
from sgray.engine.plan import ON_DEVICE, Executor
from sgray.engine.runner import ModelRunner
from sgray.errors import EngineError
from sgray.protocol import Delta, EngineInfo, Finish, Request, SamplingParams

INFO = EngineInfo("fake", "/", "Fake", "float32", "cpu", VOCAB_SIZE, 512, (), 4, 64, 4)


def prompt(seed: int, length: int) -> list[int]:
    return [mix(seed, position) % VOCAB_SIZE for position in range(length)]


# ---- the scheduler


def test_a_step_is_planned_with_a_token_that_nobody_knows_yet() -> None:
    rig = Rig(depth=1)
    rig.add("a", prompt(1, 10), max_new_tokens=3)
    first = rig.step()
    assert first is not None and rig.outputs["a"].tokens == []
    second = rig.step()
    assert second is not None and (second.starts, second.lengths, second.tokens) == ([10], [1], [ON_DEVICE])
    assert rig.outputs["a"].tokens == solo(prompt(1, 10), 1)
    assert rig.step() is not None
    assert rig.step() is None, "the third token is drawn, nothing is left to compute"
    assert (rig.outputs["a"].tokens, rig.outputs["a"].finish) == (solo(prompt(1, 10), 3), Finish("length"))
    assert rig.scheduler.num_in_flight == 0 and rig.step() is None


def test_with_a_depth_of_none_every_token_is_known() -> None:
    rig = Rig()
    rig.generate("a", prompt(1, 10), max_new_tokens=20)
    assert all(ON_DEVICE not in plan.tokens for plan in rig.executor.plans)


def test_pages_are_shared_only_when_their_step_is_answered() -> None:
    rig = Rig(depth=1, page_size=4, budget=8)
    rig.add("a", prompt(1, 16), max_new_tokens=9)
    shared = []
    for _ in range(7):
        rig.step()
        shared.append(len(rig.cache.snapshot()))
    assert shared == [0, 2, 4, 4, 4, 4, 5], "the sixth step fills a page, and is answered in the seventh"


def test_the_row_of_a_sequence_that_has_stopped_is_not_looked_at_and_its_place_is_free_at_once() -> None:
    rig = Rig(depth=1, max_running=1, num_pages=6, page_size=4, end_ids=(2,))
    rig.add("stops", prompt(1, 16), max_new_tokens=8, logit_bias={2: 100.0})
    rig.add("next", prompt(2, 20), max_new_tokens=4, repetition_penalty=1.5)
    rig.step()
    ignored = rig.step()
    assert ignored is not None and rig.outputs["stops"].finish == Finish("stop", matched=2)
    follower = rig.step()
    assert follower is not None and follower.slots == ignored.slots
    written = {page for _, _, page in ignored.new_pages}
    assert written and written < {page for _, _, page in follower.new_pages}, "the page that the ignored row writes"
    rig.run()
    assert rig.outputs["stops"].tokens == [2]
    assert rig.outputs["next"].tokens == solo(prompt(2, 20), 4)


def test_an_abort_discards_what_is_in_flight() -> None:
    rig = Rig(depth=1, max_running=1)
    rig.add("a", prompt(1, 10), max_new_tokens=9)
    rig.add("b", prompt(1, 14), max_new_tokens=9)
    rig.step()
    rig.step()
    rig.abort("a")
    rig.run()
    assert (rig.outputs["a"].tokens, rig.outputs["a"].finish) == (solo(prompt(1, 10), 1), Finish("abort"))
    assert rig.outputs["b"].tokens == solo(prompt(1, 14), 9)


def test_an_answer_to_an_earlier_run_of_a_sequence_is_not_taken_for_one_to_the_present_run() -> None:
    rig = Rig(depth=1)
    rig.add("a", prompt(1, 10), max_new_tokens=5, temperature=1.0, seed=3, logprobs=0)
    rig.step()
    rig.step()
    [sequence] = rig.scheduler._running
    assert (len(sequence.tokens), sequence.num_pending) == (11, 1)
    rig.scheduler._retract(sequence)
    rig.scheduler.check()
    again = rig.step()
    assert again is not None and again.admissions[0].tokens == sequence.tokens
    assert len(sequence.tokens) == 11, "the step that was in flight when it was retracted is answered, to nobody"
    rig.run()
    output = rig.outputs["a"]
    assert output.tokens == solo(prompt(1, 10), 5, seed=3, sampling=SamplingParams(temperature=1.0))
    assert len(output.logprobs) == 5


def test_a_sequence_alone_in_a_full_memory_gets_its_pending_token_before_it_ends() -> None:
    for depth in (0, 1):
        rig = Rig(num_pages=5, page_size=4, depth=depth)
        output = rig.generate("a", prompt(1, 10), max_new_tokens=100)
        assert (output.tokens, output.finish) == (solo(prompt(1, 10), 11), Finish("length"))


def test_plans_that_fail_end_their_sequences_and_those_before_them_are_answered() -> None:
    rig = Rig(depth=1, max_running=2, budget=10)
    rig.add("a", prompt(1, 9), max_new_tokens=1)
    rig.add("b", prompt(2, 20), max_new_tokens=4)
    rig.step()
    plan = rig.scheduler.schedule()
    assert plan is not None and plan.lengths == [10], "the rest of a's work is in flight"
    rig.scheduler.fail(EngineError("lost"), plan.step)
    assert rig.scheduler.num_in_flight == 1
    rig.run()
    assert rig.outputs["a"].tokens == solo(prompt(1, 9), 1)
    finish = rig.outputs["b"].finish
    assert finish is not None and finish.reason == "error"


def test_a_step_lasts_from_the_answer_to_the_one_before_it() -> None:
    rig = Rig(depth=1)
    rig.add("a", prompt(1, 10), max_new_tokens=5)

    def plan() -> None:
        made = rig.scheduler.schedule()
        assert made is not None
        rig.executor.submit(made)

    def answer(now: float) -> float:
        rig.now = now
        rig.scheduler.update(rig.executor.collect())
        return rig.scheduler.load().last_step_s

    plan()
    rig.now = 1.0
    plan()
    assert answer(3.0) == pytest.approx(3.0)
    rig.now = 3.5
    plan()
    assert answer(5.0) == pytest.approx(2.0), "planned at 1, but the device was busy until 3"
    assert answer(6.0) == pytest.approx(1.0)
    rig.now = 9.0
    plan()
    assert answer(10.0) == pytest.approx(1.0), "nothing was in flight before it was planned"


# ---- the engine


class Bench:
    """An engine on any executor, with what it told."""

    def __init__(self, executor: Executor, info: EngineInfo, **config: dict[str, object]) -> None:
        self.executor = executor
        self.engine = Engine(executor, info, Config.parse(config))
        self.deltas: list[Delta] = []

    def step(self) -> None:
        self.deltas += self.engine.step().deltas
        self.engine.check()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def tokens(self, id: str) -> list[int]:
        return [token for delta in self.deltas if delta.id == id for token in delta.tokens]

    def reason(self, id: str) -> str | None:
        reasons = [delta.finish.reason for delta in self.deltas if delta.id == id and delta.finish]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None


@pytest.fixture
def fake() -> FakeExecutor:
    return FakeExecutor(INFO.num_pages, INFO.page_size, depth=1)


def request(id: str, tokens: list[int], count: int = 5) -> Request:
    return Request(id, tokens, SamplingParams(temperature=0, max_new_tokens=count))


def test_there_is_work_while_a_step_is_in_flight(fake: FakeExecutor) -> None:
    bench = Bench(fake, INFO)
    bench.engine.add(request("a", [1, 2, 3]))
    bench.step()
    bench.engine.abort("a")
    bench.deltas += bench.engine.report().deltas
    assert bench.reason("a") == "abort" and bench.engine.has_work and len(fake.submitted) == 1
    bench.step()
    assert not bench.engine.has_work and not fake.submitted
    bench.engine.check()


@pytest.mark.parametrize("is_disabled", [False, True])
def test_overlap_can_be_disabled(fake: FakeExecutor, is_disabled: bool) -> None:
    bench = Bench(fake, INFO, schedule={"disable_overlap": is_disabled})
    bench.engine.add(request("a", [1, 2, 3]))
    bench.run()
    assert any(ON_DEVICE in plan.tokens for plan in fake.plans) == (not is_disabled)
    assert bench.tokens("a") == solo([1, 2, 3], 5)


def test_a_launch_that_fails_leaves_the_step_in_flight_to_be_answered(
    fake: FakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(fake, INFO, schedule={"chunked_prefill_size": 8})
    bench.engine.add(request("a", prompt(1, 7), 1))
    bench.engine.add(request("b", prompt(2, 9)))
    bench.step()
    fake.refuse = 1
    with caplog.at_level(logging.ERROR):
        bench.step()
    assert bench.engine.failure == "RuntimeError: the launch failed" and "step 2 failed" in caplog.text
    assert (bench.reason("a"), bench.reason("b")) == (None, "error")
    bench.step()
    assert bench.tokens("a") == solo(prompt(1, 7), 1)
    assert bench.engine.failure is not None, "that step was ahead of the one that failed"
    bench.engine.add(request("c", prompt(2, 9)))
    bench.run()
    assert bench.tokens("c") == solo(prompt(2, 9), 5) and bench.engine.failure is None


def test_a_step_that_fails_takes_those_behind_it_along(fake: FakeExecutor, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(fake, INFO, schedule={"chunked_prefill_size": 8, "max_queued_requests": 9})
    for number in range(3):
        bench.engine.add(request(f"{number}", prompt(number, 8)))
    bench.step()
    fake.explode = 1
    with caplog.at_level(logging.ERROR):
        bench.step()
    assert "step 1 failed" in caplog.text and not fake.submitted
    assert [bench.reason(f"{number}") for number in range(3)] == ["error", "error", None]
    bench.run()
    assert bench.tokens("2") == solo(prompt(2, 8), 5) and bench.engine.failure is None


def test_all_can_be_failed_with_a_step_in_flight(fake: FakeExecutor) -> None:
    bench = Bench(fake, INFO)
    bench.engine.add(request("a", prompt(1, 8)))
    bench.step()
    bench.step()
    bench.engine.fail_all(EngineError("reset"))
    assert not fake.submitted
    bench.engine.add(request("b", prompt(1, 8)))
    bench.run()
    assert bench.reason("a") == "error" and bench.tokens("b") == solo(prompt(1, 8), 5)


# ---- a real model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, EngineInfo]:
    values = {
        "model": {
            "device": "cpu",
            "num_threads": 1,
            "model_path": str(make_twin(tmp_path_factory.mktemp("twin"))),
            "dtype": "float32",
        },
        "memory": {"max_total_tokens": 104, "page_size": 8},
        "schedule": {"max_running_requests": 6},
    }
    executor, info = load_executor(Config.parse(values))
    assert isinstance(executor, ModelRunner)
    return executor, info


def wishes(source: random.Random) -> SamplingParams:
    """What a request may ask for, all of it now and then."""
    return SamplingParams(
        max_new_tokens=source.choice([0, 1, 2, 9, 30, 40]),
        min_new_tokens=source.choice([0, 0, 4]),
        temperature=source.choice([0.0, 0.9]),
        top_k=source.choice([0, 0, 20]),
        repetition_penalty=source.choice([1.0, 1.3]),
        frequency_penalty=source.choice([0.0, 0.5]),
        seed=source.randrange(1000),
        stop_token_ids=tuple(source.choices(range(3, 101), k=source.choice([0, 6]))),
        logprobs=source.choice([-1, 0, 2]),
        prompt_logprobs=source.choice([-1, -1, 1]),
    )


def play(bench: Bench, seed: int) -> None:
    """Fourteen requests, most of them siblings, arrive while others run; two are given up."""
    source = random.Random(seed)
    stem = some_tokens(60, seed=seed)
    for number in range(14):
        start = stem[: source.choice([0, 20, 37])]
        tokens = start + some_tokens(source.randrange(1, 20), seed=100 * seed + number)
        bench.engine.add(Request(f"{number}", tokens, wishes(source)))
        for _ in range(source.choice([0, 0, 1, 3])):
            bench.step()
        if number in (5, 9):
            bench.engine.abort(f"{number}")
    bench.run()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_overlapped_is_serial(loaded: tuple[ModelRunner, EngineInfo], seed: int) -> None:
    runner, info = loaded
    benches = [
        Bench(
            ModelRunner(runner._model, runner._pool, runner._backend, depth=depth),
            info,
            schedule={"chunked_prefill_size": 48, "mixed_prefill_size": 20},
        )
        for depth in (0, 1)
    ]
    for bench in benches:
        runner._pool.pages.fill_(9.0)  # nothing right is left in them
        bench.engine._scheduler._limits = replace(bench.engine._scheduler._limits, min_lookahead=0)
        bench.engine._scheduler._lookahead = 0
        play(bench, seed)
    serial, overlapped = benches
    assert min(bench.engine.current_load().retracted for bench in benches) > 0, "memory was short"
    for name in sorted({delta.id for delta in serial.deltas}):
        assert overlapped.reason(name) == serial.reason(name)
        if serial.reason(name) == "abort":  # how far it had come is a matter of time
            continue
        assert overlapped.tokens(name) == serial.tokens(name)
        for field in ("logprobs", "prompt_logprobs"):
            assert told(overlapped, name, field) == told(serial, name, field)


def told(bench: Bench, name: str, field: str) -> list[object]:
    """Entries of log-probabilities of one request; the numbers to four places."""
    entries = [entry for delta in bench.deltas if delta.id == name for entry in getattr(delta, field) or []]
    return [entry and (pytest.approx(entry.logprob, abs=1e-3), [token for token, _ in entry.top]) for entry in entries]
