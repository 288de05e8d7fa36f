"""The replica actor's class with its real engine, driven by hand: no Ray cluster is needed for what it does itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import sgray.serve.replica as replica_module
from sgray.engine.engine import Engine
from sgray.protocol import Delta, Request, SamplingParams, StepReport
from sgray.serve.dispatch import Dispatcher
from sgray.serve.replica import LLMReplica
from sgray.serve.table import Endpoint

VALUES: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "memory": {"max_total_tokens": 2048},
    "serve": {"wedge_timeout_s": 0.5},
}


class Replica(LLMReplica):
    """Serve awaits the asynchronous `__del__`; Python's own call at the object's end has nobody to do so."""

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing; the tests await `LLMReplica.__del__`."""


def run(test: Callable[[LLMReplica, Dispatcher], Awaitable[None]]) -> None:
    async def main() -> None:
        replica = Replica.__new__(Replica)
        await LLMReplica.__init__(replica, VALUES)  # type: ignore[misc]
        dispatcher = Dispatcher()
        endpoint = Endpoint.from_metadata(replica.record_replica_metadata())
        assert endpoint is not None
        dispatcher.set_replicas({"r": endpoint})
        await asyncio.wait_for(dispatcher.wait_known(), 5)
        try:
            await asyncio.wait_for(test(replica, dispatcher), 60)
        finally:
            await dispatcher.close()
            await LLMReplica.__del__(replica)

    asyncio.run(main())


def request(name: str, max_new_tokens: int) -> Request:
    return Request(name, [1, 2, 3, 4, 5], SamplingParams(max_new_tokens, temperature=0.0, ignore_eos=True))


async def deltas_of(dispatcher: Dispatcher, wanted: Request) -> list[Delta]:
    return [delta async for delta in dispatcher.submit(wanted)]


def test_a_replica_serves_counts_and_is_healthy(model_dir: object) -> None:
    async def test(replica: LLMReplica, dispatcher: Dispatcher) -> None:
        task = asyncio.create_task(deltas_of(dispatcher, request("a", 20)))
        while not replica.record_autoscaling_stats()["ongoing"]:
            await asyncio.sleep(0.01)
        await replica.check_health()
        deltas = await task
        assert sum(len(delta.tokens) for delta in deltas) == 20
        idle = replica.record_autoscaling_stats()
        assert idle["ongoing"] == idle["wait_s"] == idle["memory_share"] == idle["seat_share"] == 0.0
        assert 0.0 < idle["prefill_share"] < 1.0, "its prompt came just now"
        assert dispatcher.loads()["r"].generation_tokens == 20

    run(test)


def test_a_replica_that_goes_away_finishes_its_streams_first(model_dir: object) -> None:
    async def test(replica: LLMReplica, dispatcher: Dispatcher) -> None:
        task = asyncio.create_task(deltas_of(dispatcher, request("a", 40)))
        while not replica.record_autoscaling_stats()["ongoing"]:
            await asyncio.sleep(0.01)
        await LLMReplica.__del__(replica)
        deltas = await task
        assert sum(len(delta.tokens) for delta in deltas) == 40
        while dispatcher.ready():  # until the closing of the link has arrived
            await asyncio.sleep(0.01)

    run(test)


def test_pub_127_a_wedged_engine_is_unhealthy_and_is_not_waited_for(
    model_dir: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    step = Engine.step
    monkeypatch.setattr(replica_module, "PATIENCE", 0.0)
    monkeypatch.setattr(replica_module, "FIRST_STEPS_S", 0.5)

    def blocked(engine: Engine) -> StepReport:
        released.wait(30)
        return step(engine)

    async def test(replica: LLMReplica, dispatcher: Dispatcher) -> None:
        await replica.check_health()
        monkeypatch.setattr(Engine, "step", blocked)
        task = asyncio.create_task(deltas_of(dispatcher, request("a", 4)))
        await asyncio.sleep(0.2)
        await replica.check_health()  # one slow step is not a wedge
        await asyncio.sleep(0.6)
        for _ in range(2):
            assert dispatcher.ready()
            with pytest.raises(RuntimeError, match="no step has ended"):
                await replica.check_health()
        while dispatcher.ready():  # its streams may go on elsewhere, whatever Serve does
            await asyncio.sleep(0.01)
        await asyncio.wait_for(LLMReplica.__del__(replica), 5)
        task.cancel()
        released.set()
        while replica._engine_loop.health().busy:  # so that the thread can be stopped
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="no step has ended"):
            await replica.check_health()  # there is no way back: it has cut its links

    run(test)


def test_a_step_may_take_ten_times_as_long_as_slow_ones_and_as_a_chunk_of_prompt(model_dir: object) -> None:
    async def test(replica: LLMReplica, dispatcher: Dispatcher) -> None:
        assert replica._patience_s(0.0) == replica_module.FIRST_STEPS_S, "nothing is known yet"
        await deltas_of(dispatcher, Request("a", [1] * 700, SamplingParams(2)))
        speed = dispatcher.loads()["r"].prefill_tokens_per_s
        chunk_s = replica._step_tokens / speed
        assert replica._patience_s(0.001) == pytest.approx(max(0.5, 10 * chunk_s))
        assert replica._patience_s(chunk_s + 3) == pytest.approx(10 * chunk_s + 30)

    run(test)


def test_a_replica_that_goes_away_hands_over_what_takes_too_long(model_dir: object) -> None:
    async def test(replica: LLMReplica, dispatcher: Dispatcher) -> None:
        stream = dispatcher.submit(request("a", 60))
        tokens = [token for _ in range(5) for token in (await anext(stream)).tokens]
        replica._drain_s = 0.0
        await asyncio.wait_for(LLMReplica.__del__(replica), 5)
        other = Replica.__new__(Replica)
        await LLMReplica.__init__(other, VALUES)  # type: ignore[misc]
        endpoint = Endpoint.from_metadata(other.record_replica_metadata())
        assert endpoint is not None
        dispatcher.set_replicas({"other": endpoint})
        tokens += [token for delta in [delta async for delta in stream] for token in delta.tokens]
        undisturbed = [token for delta in await deltas_of(dispatcher, request("b", 60)) for token in delta.tokens]
        assert tokens == undisturbed
        assert 0 < dispatcher.loads()["other"].generation_tokens < 120, "the first tokens are not drawn again"
        await LLMReplica.__del__(other)

    run(test)


def test_a_replica_whose_device_has_failed_ends_by_itself(model_dir: object, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(replica_module, "end_process", ended.set)

    async def test(replica: LLMReplica, dispatcher: Dispatcher) -> None:
        await replica.check_health()
        await asyncio.sleep(2 * replica_module.LOST_POLL_S)
        assert dispatcher.ready() and not ended.is_set()
        monkeypatch.setattr(replica._engine_loop._engine, "_fault", "it fell off the bus")
        with pytest.raises(RuntimeError, match="can compute no more: it fell off the bus"):
            await replica.check_health()
        assert await asyncio.to_thread(ended.wait, 5)
        assert not dispatcher.ready(), "its streams could go on elsewhere"

    run(test)
