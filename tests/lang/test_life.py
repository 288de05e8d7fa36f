"""A program as one thing: what its requests have computed stays while it lives, and not a moment longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from waiting import until

import sgray as sgl
from sgray.lang.life import Life
from sgray.lang.native import NativeBackend

LONG = "A long beginning that all branches of this program share, word for word, so that it is computed once. " * 6


class Watched:
    """The transport of a backend, with what goes over it."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.calls: list[tuple[str, dict]] = []
        self.ended: list[str] = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def call(self, name, body):
        self.calls.append((name, dict(body)))
        return await self._inner.call(name, body)

    async def end_programs(self, programs):
        self.ended += programs
        await self._inner.end_programs(programs)

    def generated(self) -> list[dict]:
        return [body for name, body in self.calls if name == "generate"]


@pytest.fixture
def watched(toy: sgl.Engine) -> NativeBackend:
    return NativeBackend(Watched(toy.backend.transport), toy.loop)


@contextmanager
def held_back(gate: threading.Event) -> Iterator[None]:
    """Whatever happens, the function that waits for the gate goes on."""
    try:
        yield
    finally:
        gate.set()


def num_held(engine: sgl.Engine) -> int:
    """Pages that the engine keeps for programs."""
    return engine.local._engine._cache.num_held


def test_all_requests_of_a_program_bear_its_name_and_it_ends_once(watched: NativeBackend) -> None:
    @sgl.function
    def branched(s):
        s += "Tips:" + sgl.gen("a", max_tokens=2)
        forks = s.fork(3)
        forks += sgl.gen("b", max_tokens=2)
        forks.join()
        s += sgl.select("c", ["yes", "no"])

    states = branched.run_batch([{}, {}], temperature=0, backend=watched)
    names = [body["program_id"] for body in watched.transport.generated()]
    assert sorted(names.count(name) for name in set(names)) == [5, 5]
    until(lambda: len(watched.transport.ended) == 2)
    assert set(watched.transport.ended) == set(names) == {state.stream.life.name for state in states}


def test_what_a_program_has_computed_is_held_until_it_ends(toy: sgl.Engine) -> None:
    gate = threading.Event()

    @sgl.function
    def waits(s):
        s += LONG + sgl.gen("a", max_tokens=2)
        s["a"]
        gate.wait(20)

    with held_back(gate):
        toy.flush_cache()
        state = waits.run(stream=True, temperature=0, backend=toy)
        assert state["a"]
        until(lambda: num_held(toy) >= 8)
        gate.set()
        until(lambda: num_held(toy) == 0)


@pytest.mark.parametrize("way", ["cancelled", "dropped", "failed"])
def test_what_an_abandoned_program_has_computed_is_let_go_at_once(toy: sgl.Engine, way: str) -> None:
    gate = threading.Event()

    @sgl.function
    def waits(s):
        s += LONG + sgl.gen("a", max_tokens=2)
        s["a"]
        gate.wait(20)
        if way == "failed":
            raise LookupError("of my own")

    with held_back(gate):
        toy.flush_cache()
        state = waits.run(stream=True, temperature=0, backend=toy)
        assert state["a"]
        until(lambda: num_held(toy) >= 8)
        if way == "cancelled":
            state.cancel()
        elif way == "failed":
            gate.set()
        del state  # nobody can read it any more
        until(lambda: num_held(toy) == 0)


def test_a_state_that_is_written_to_after_its_end_lives_again(watched: NativeBackend) -> None:
    @sgl.function
    def once(s):
        s += "Once" + sgl.gen("a", max_tokens=2)

    state = once.run(temperature=0, backend=watched)
    until(lambda: len(watched.transport.ended) == 1)
    state += sgl.gen("b", max_tokens=2)
    assert state["b"]
    until(lambda: watched.transport.ended == [state.stream.life.name] * 2)


def test_text_that_a_waiting_program_will_go_on_from_is_computed_meanwhile(watched: NativeBackend) -> None:
    found = []

    @sgl.function
    def waits(s, pause):
        s += "Think." + sgl.gen("a", max_tokens=2)
        s["a"]
        s += LONG
        time.sleep(pause)  # a tool, as it were
        s += sgl.gen("b", max_tokens=2)
        found.append(s.get_meta_info("b")["cached_tokens"])

    transport = watched.transport
    for pause in (0.0, 0.5):
        watched.loop.run(watched.flush())
        transport.calls.clear()
        waits.run(pause=pause, temperature=0, backend=watched)
        silent = [body for body in transport.generated() if body["sampling_params"]["max_new_tokens"] == 0]
        assert len(silent) == (1 if pause else 0)
    assert found[0] < 16 and found[1] > 100


def test_text_that_is_short_or_that_nobody_goes_on_from_is_not_computed(watched: NativeBackend) -> None:
    @sgl.function
    def ends(s, text):
        s += "Think." + sgl.gen("a", max_tokens=2)
        s["a"]
        s += text
        time.sleep(0.1 if len(text) < 9 else 0.0)

    for text in ("short", LONG):
        watched.transport.calls.clear()
        ends.run(text=text, temperature=0, backend=watched)
        time.sleep(0.1)
        assert len(watched.transport.generated()) == 1


def test_a_constant_beginning_is_cached_without_a_token_drawn(watched: NativeBackend) -> None:
    @sgl.function
    def shots(s, question):
        s += LONG + question + sgl.gen("a", max_tokens=2)

    watched.loop.run(watched.flush())
    assert shots.cache(backend=watched) == LONG
    (body,) = watched.transport.generated()
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert shots.run(question="?", backend=watched).get_meta_info("a")["cached_tokens"] > 100


def test_a_life_without_a_request_ends_in_silence() -> None:
    ended: list[str] = []
    life = Life(ended.append)
    life.begin(1)
    life.finish(1)
    life.abandon()
    assert ended == []
    life.enter_body()
    life.begin(1)
    assert life.ask() == life.name
    life.finish(1)
    assert ended == []
    life.leave_body()
    life.leave_body()
    assert ended == [life.name]
