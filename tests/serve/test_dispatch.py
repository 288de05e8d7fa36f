"""The dispatcher between real links and replicas whose engine is a few lines that echo the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from sgray.errors import InvalidRequestError, OverloadedError, ReplicaLostError
from sgray.protocol import (
    NO_LOGPROBS,
    CacheEvent,
    Delta,
    EngineInfo,
    ErrorInfo,
    Finish,
    Load,
    Request,
    SamplingParams,
    StepReport,
    TokenLogprobs,
    namespace_key,
    page_hashes,
)
from sgray.serve.dispatch import Dispatcher, DispatchLimits
from sgray.serve.frames import LinkLimits
from sgray.serve.link import LinkServer
from sgray.serve.table import Endpoint

INFO = EngineInfo("tiny", "/models/tiny", "LlamaForCausalLM", "float32", "cpu", 256, 512, (2,), 16, 64, 8)
LINK_LIMITS = LinkLimits(heartbeat_s=0.05, dead_after_beats=40, open_timeout_s=1.0)
LIMITS = DispatchLimits(wait_for_replica_s=5.0, first_reconnect_s=0.01, last_reconnect_s=0.05)
BUSY = ErrorInfo(503, "overloaded_error", "queue full", code="overloaded")


class EchoReplica:
    """Repeats the prompt, one token a call of `step`, or by itself when `automatic`; refuses when `refusal` is set."""

    def __init__(self, name: str, info: EngineInfo = INFO) -> None:
        self.name = name
        self.automatic = True
        self.refusal: ErrorInfo | None = None
        self.is_flushable = True
        self.running: dict[str, list[int]] = {}
        self.served: list[Request] = []
        self.server = LinkServer(self, info, "token", LINK_LIMITS)

    async def start(self) -> Endpoint:
        return Endpoint("127.0.0.1", await self.server.start("127.0.0.1"), "token")

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            self.publish(Delta(request.id, finish=Finish("error", error=self.refusal)))
            return
        self.served.append(request)
        self.running[request.id] = request.tokens[request.num_generated : request.num_prompt]
        if self.automatic:
            while request.id in self.running:
                self.step(request.id)

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def flush(self, done: Callable[[bool], None]) -> None:
        done(self.is_flushable)

    def step(self, request_id: str) -> None:
        left = self.running[request_id]
        token = left.pop(0)
        if not left:
            del self.running[request_id]
        self.publish(Delta(request_id, [token], finish=None if left else Finish("length"), cached_tokens=0))

    def publish(self, *deltas: Delta, events: list[CacheEvent] | None = None) -> None:
        self.server.publish(StepReport(list(deltas), events or [], Load(running=len(self.running))))


class World:
    """Named replicas and a dispatcher that knows of them."""

    def __init__(self) -> None:
        self.wakes = 0
        self.dispatcher = Dispatcher(wake=self.wake, limits=LIMITS, link_limits=LINK_LIMITS)
        self.replicas: dict[str, EchoReplica] = {}
        self.endpoints: dict[str, Endpoint] = {}

    def wake(self) -> None:
        self.wakes += 1

    async def add(self, name: str, info: EngineInfo = INFO) -> EchoReplica:
        replica = self.replicas[name] = EchoReplica(name, info)
        self.endpoints[name] = await replica.start()
        self.dispatcher.set_replicas(self.endpoints)
        await until(lambda: name in self.dispatcher.loads())
        return replica

    async def kill(self, name: str) -> None:
        """The process is gone; Serve has not noticed."""
        server = self.replicas[name].server
        await server.close()

    def remove(self, name: str) -> None:
        """Serve takes the replica out of the table."""
        del self.endpoints[name]
        self.dispatcher.set_replicas(self.endpoints)

    def home(self, request_id: str) -> EchoReplica:
        """Where it runs, under the id that it has there."""
        ids = {name.partition("~")[0]: one for one in self.replicas.values() for name in one.running}
        return ids[request_id]


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        try:
            await asyncio.wait_for(test(world), 20)
            if world.dispatcher._router is not None:
                world.dispatcher._router.check()
        finally:
            await world.dispatcher.close()
            for replica in world.replicas.values():
                await replica.server.close()
            await asyncio.sleep(0.02)

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


async def tokens_of(world: World, request: Request) -> list[int]:
    return [token async for delta in world.dispatcher.submit(request) for token in delta.tokens]


def test_an_answer_comes_back_whole() -> None:
    async def test(world: World) -> None:
        await world.add("a")
        assert await tokens_of(world, Request("1", [5, 6, 7])) == [5, 6, 7]
        assert world.dispatcher.ready()
        assert world.dispatcher.info == INFO

    run(test)


def test_a_busy_replica_sends_the_request_to_the_other() -> None:
    async def test(world: World) -> None:
        busy, free = await world.add("a"), await world.add("b")
        busy.refusal = BUSY
        for index in range(20):
            assert await tokens_of(world, Request(str(index), [index])) == [index]
        assert len(free.served) == 20

    run(test)


def test_when_all_are_busy_the_caller_is_told_at_once() -> None:
    async def test(world: World) -> None:
        for name in "ab":
            (await world.add(name)).refusal = BUSY
        with pytest.raises(OverloadedError) as caught:
            await asyncio.wait_for(tokens_of(world, Request("1", [1])), 1)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)

    run(test)


def test_a_bad_request_is_not_tried_elsewhere() -> None:
    async def test(world: World) -> None:
        for name in "ab":
            replica = await world.add(name)
            replica.refusal = ErrorInfo(400, "invalid_request_error", "too long", "messages", "context_length_exceeded")
        with pytest.raises(InvalidRequestError) as caught:
            await tokens_of(world, Request("1", [1]))
        assert (caught.value.param, caught.value.code, caught.value.message) == (
            "messages",
            "context_length_exceeded",
            "too long",
        )

    run(test)


def test_a_request_of_which_nothing_came_moves_when_its_replica_dies() -> None:
    async def test(world: World) -> None:
        for name in "ab":
            (await world.add(name)).automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: any(replica.running for replica in world.replicas.values()))
        first = world.home("1")
        other = next(replica for replica in world.replicas.values() if replica is not first)
        other.automatic = True
        await world.kill(first.name)
        assert await task == [5, 6]
        assert [request.id for request in other.served] == ["1~1"]

    run(test)


def test_an_answer_that_has_begun_goes_on_elsewhere_when_its_replica_dies() -> None:
    async def test(world: World) -> None:
        for name in "abc":
            (await world.add(name)).automatic = False
        request = Request("1", [5, 6, 7, 8], SamplingParams(prompt_logprobs=0), salt="s", priority=3)
        deltas = world.dispatcher.submit(request)
        got: list[Delta] = []
        for _ in range(LIMITS.max_moves + 1):
            coming = asyncio.ensure_future(anext(deltas))
            await until(lambda: any(replica.running for replica in world.replicas.values()))
            [(home, name)] = [(one, name) for one in world.replicas.values() for name in one.running]
            home.step(name)
            got.append(await coming)
            if len(got) <= LIMITS.max_moves:
                await world.kill(home.name)
                home.running.clear()
        home.step(name)
        got.append(await anext(deltas))
        assert [(delta.id, delta.tokens, delta.cached_tokens) for delta in got] == [
            ("1", [5], 0),
            ("1", [6], None),
            ("1", [7], None),
            ("1", [8], None),
        ]
        assert got[-1].finish == Finish("length")
        sent = [one.served[0] for one in world.replicas.values()]
        assert sorted((one.id, one.tokens, one.num_generated) for one in sent) == [
            ("1", [5, 6, 7, 8], 0),
            ("1~1", [5, 6, 7, 8, 5], 1),
            ("1~2", [5, 6, 7, 8, 5, 6], 2),
        ]
        assert {one.sampling.prompt_logprobs for one in sent if one.num_generated} == {NO_LOGPROBS}
        assert len({(one.sampling.seed, one.salt, one.priority) for one in sent}) == 1
        assert sent[0].sampling.seed is not None

    run(test)


def test_an_answer_does_not_go_on_with_another_model() -> None:
    async def test(world: World) -> None:
        (await world.add("a")).automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: world.replicas["a"].running)
        world.replicas["a"].step("1")
        stranger = await world.add("b", replace(INFO, model_dir="/models/other"))
        world.remove("a")
        await world.kill("a")
        await asyncio.sleep(0.1)
        assert not task.done()
        assert not stranger.served
        twin = await world.add("c", replace(INFO, num_pages=999, max_running_requests=1))
        assert await asyncio.wait_for(task, 2) == [5, 6]
        assert [request.id for request in twin.served] == ["1~1"]

    run(test)


@pytest.mark.parametrize("code", ["replica_lost", "device_lost"])
def test_a_replica_that_says_that_it_is_lost_gets_nothing_more(code: str) -> None:
    async def test(world: World) -> None:
        lost = await world.add("a")
        lost.refusal = ErrorInfo(500, "server_error", "the device is gone", code=code)
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: not world.dispatcher.ready())
        assert not task.done(), "there is no other one yet"
        await world.add("b")
        assert await asyncio.wait_for(task, 2) == [5, 6]
        assert world.replicas["b"].served[0].id == "1~1"

    run(test)


def test_a_silent_replica_is_left_and_what_it_says_later_is_not_heard() -> None:
    async def test(world: World) -> None:
        world.dispatcher._link_limits = replace(LINK_LIMITS, dead_after_beats=4)
        for name in "ab":
            (await world.add(name)).automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: any(replica.running for replica in world.replicas.values()))
        asleep = world.home("1")
        awake = next(replica for replica in world.replicas.values() if replica is not asleep)
        awake.automatic = True
        asleep.step("1")
        await asyncio.sleep(0.03)
        for peer in asleep.server._peers:  # as a stopped process: the connection stands, nothing comes
            peer.connection._transport.pause_reading()  # type: ignore[union-attr]
            peer.connection._beat_timer.cancel()  # type: ignore[union-attr]
        assert await asyncio.wait_for(task, 3) == [5, 6]
        assert [request.num_generated for request in awake.served] == [1]
        for peer in list(asleep.server._peers):
            peer.connection._transport.resume_reading()  # type: ignore[union-attr]
        await until(lambda: "1" not in asleep.running)

    run(test)


def test_a_draining_replica_keeps_its_streams_and_gets_no_new_ones_although_the_table_still_has_it() -> None:
    async def test(world: World) -> None:
        old = await world.add("a")
        old.automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: old.running)
        old.server.drain()
        early = asyncio.create_task(tokens_of(world, Request("2", [7])))  # it may be on its way already
        await until(lambda: not world.dispatcher.ready())
        late = asyncio.create_task(tokens_of(world, Request("3", [8])))
        await asyncio.sleep(0.05)
        assert not early.done() and not late.done(), "they wait for another one"
        await world.add("b")
        assert await early == [7]
        assert await late == [8]
        old.step("1")
        old.step("1")
        assert await task == [5, 6]
        assert len(old.served) == 1

    run(test)


def test_a_call_is_stopped_by_its_name_where_no_replica_has_it_and_where_its_replica_goes_away() -> None:
    async def test(world: World) -> None:
        stream = world.dispatcher.submit(Request("job/c-0", [1, 2]))
        waiting = asyncio.ensure_future(anext(stream))
        other = asyncio.create_task(tokens_of(world, Request("else/c-1", [3])))
        await asyncio.sleep(0.02)
        world.dispatcher.abort_calls("job")
        assert (await waiting).finish == Finish("abort")
        leaving = await world.add("a")
        assert await other == [3]
        leaving.automatic = False
        deltas = world.dispatcher.submit(Request("job/c-2", [1, 2]))
        reading = asyncio.ensure_future(anext(deltas))
        await until(lambda: leaving.running)
        world.remove("a")
        world.dispatcher.abort_calls("job")
        await until(lambda: not leaving.running)
        leaving.publish(Delta("job/c-2", finish=Finish("abort")))
        assert (await reading).finish == Finish("abort")
        await deltas.aclose()
        await until(lambda: not world.dispatcher._retired)

    run(test)


def test_seeds_of_requests_without_one_differ_and_can_be_fixed() -> None:
    async def test(world: World) -> None:
        replica = await world.add("a")
        for name in "12":
            await tokens_of(world, Request(name, [1]))
        await tokens_of(world, Request("own", [1], SamplingParams(seed=7)))
        free, other, own = (request.sampling.seed for request in replica.served)
        assert free != other and own == 7
        for _ in range(2):
            dispatcher = Dispatcher(random_seed=5, limits=LIMITS, link_limits=LINK_LIMITS)
            dispatcher.set_replicas(world.endpoints)
            async for _ in dispatcher.submit(Request("fixed", [1])):
                pass
            await dispatcher.close()
        assert replica.served[-1].sampling == replica.served[-2].sampling

    run(test)


def test_a_request_that_kills_its_replicas_is_not_passed_on_for_ever() -> None:
    async def test(world: World) -> None:
        for name in "abcdef":
            (await world.add(name)).automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5])))
        for _ in range(LIMITS.max_moves + 1):
            await until(lambda: any(replica.running for replica in world.replicas.values()))
            await world.kill(world.home("1").name)
        with pytest.raises(ReplicaLostError, match="3 replicas were lost") as caught:
            await asyncio.wait_for(task, 2)
        assert (caught.value.status, caught.value.code) == (503, "replica_lost")
        assert len(world.dispatcher.loads()) == 3, "the other replicas still live"

    run(test)


def test_closing_the_stream_aborts_the_request() -> None:
    async def test(world: World) -> None:
        replica = await world.add("a")
        replica.automatic = False
        deltas = world.dispatcher.submit(Request("1", [5, 6]))
        first = asyncio.ensure_future(deltas.__anext__())
        await until(lambda: replica.running)
        replica.step("1")
        await first
        await deltas.aclose()
        await deltas.aclose()
        await until(lambda: not replica.running)

    run(test)


def test_cancelling_a_waiting_reader_aborts_the_request() -> None:
    async def test(world: World) -> None:
        replica = await world.add("a")
        replica.automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: replica.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not replica.running)

    run(test)


def test_a_request_waits_for_the_first_replica_and_asks_for_one() -> None:
    async def test(world: World) -> None:
        with pytest.raises(OverloadedError):
            _ = world.dispatcher.info
        assert not world.dispatcher.ready()
        task = asyncio.create_task(tokens_of(world, Request("1", [5])))
        waiting = asyncio.create_task(world.dispatcher.wait_known())
        await asyncio.sleep(0.05)
        assert not task.done()
        assert world.wakes >= 1
        await world.add("a")
        assert await task == [5]
        await waiting

    run(test)


def test_waiting_for_a_replica_ends() -> None:
    async def test(world: World) -> None:
        world.dispatcher._limits = replace(LIMITS, wait_for_replica_s=0.05)
        with pytest.raises(OverloadedError, match="no engine replica is running"):
            await tokens_of(world, Request("1", [5]))

    run(test)


def test_a_replica_that_left_the_table_finishes_its_streams_and_gets_no_new_ones() -> None:
    async def test(world: World) -> None:
        old = await world.add("a")
        old.automatic = False
        task = asyncio.create_task(tokens_of(world, Request("1", [5, 6])))
        await until(lambda: old.running)
        new = await world.add("b")
        world.remove("a")
        assert list(world.dispatcher.loads()) == ["b"]
        for index in range(5):
            await tokens_of(world, Request(f"n{index}", [1]))
        assert len(new.served) == 5
        old.step("1")
        old.step("1")
        assert await task == [5, 6]
        await until(lambda: not old.server._peers)

    run(test)


def test_a_broken_link_to_a_living_replica_is_made_again() -> None:
    async def test(world: World) -> None:
        replica = await world.add("a")
        for peer in list(replica.server._peers):
            peer.connection.abort("the network failed")
        await until(lambda: not world.dispatcher.ready())
        await until(world.dispatcher.ready)
        assert await tokens_of(world, Request("1", [5])) == [5]

    run(test)


def test_siblings_of_a_burst_meet_on_one_replica_and_cached_pages_are_predicted() -> None:
    async def test(world: World) -> None:
        for name in "abc":
            (await world.add(name)).automatic = False
        tokens = list(range(200))
        tasks = [asyncio.create_task(tokens_of(world, Request(f"s{index}", tokens))) for index in range(4)]
        await until(lambda: sum(len(replica.running) for replica in world.replicas.values()) == 4)
        home = world.home("s0")
        assert len(home.running) == 4
        home.publish(events=[CacheEvent("stored", page_hashes(tokens, INFO.page_size, namespace_key()))])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        home.automatic = True
        await tokens_of(world, Request("again", tokens))
        assert home.served[-1].id == "again"
        assert world.dispatcher.predictions.predicted == 192

    run(test)


def test_salts_do_not_share_a_prefix() -> None:
    async def test(world: World) -> None:
        replica = await world.add("a")
        tokens = list(range(200))
        replica.publish(events=[CacheEvent("stored", page_hashes(tokens, INFO.page_size, namespace_key()))])
        await asyncio.sleep(0.05)
        await tokens_of(world, Request("1", tokens, salt="tenant"))
        assert world.dispatcher.predictions.predicted == 0
        await tokens_of(world, Request("2", tokens))
        assert world.dispatcher.predictions.predicted == 192

    run(test)


def test_a_slow_reader_gets_everything_in_fewer_deltas() -> None:
    async def test(world: World) -> None:
        replica = await world.add("a")
        replica.automatic = False
        request = Request("1", [1], SamplingParams(logprobs=0))
        deltas = world.dispatcher.submit(request)
        first = asyncio.ensure_future(deltas.__anext__())
        await until(lambda: replica.running)
        for token in range(50):
            replica.publish(
                Delta("1", [token], [TokenLogprobs(-float(token))], cached_tokens=None if token else 0),
            )
        replica.publish(Delta("1", [99], [TokenLogprobs(-99.0)], finish=Finish("stop", matched=99)))
        await asyncio.sleep(0.1)
        got = [await first]
        await asyncio.sleep(0.05)
        got += [delta async for delta in deltas]
        assert len(got) <= 2
        assert [token for delta in got for token in delta.tokens] == [*range(50), 99]
        logprobs = [entry.logprob for delta in got for entry in delta.logprobs or []]
        assert logprobs == [-float(token) for token in [*range(50), 99]]
        assert got[0].cached_tokens == 0
        assert got[-1].finish == Finish("stop", matched=99)

    run(test)


def test_a_flush_names_the_replicas_that_could_not() -> None:
    async def test(world: World) -> None:
        assert await world.dispatcher.flush() == []
        for name in ("a", "b"):
            await world.add(name)
        assert await world.dispatcher.flush() == []
        world.replicas["b"].is_flushable = False
        assert await world.dispatcher.flush() == ["b"]

    run(test)


def test_a_call_stopped_by_its_name_ends_its_stream_wherever_it_runs() -> None:
    async def test(world: World) -> None:
        for name in ("a", "b"):
            (await world.add(name)).automatic = False
        streams = [world.dispatcher.submit(Request(f"job_{n}/c-{n}", [n])) for n in range(4)]
        reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await until(lambda: sum(len(replica.running) for replica in world.replicas.values()) == 4)
        world.dispatcher.abort_calls("job")
        await until(lambda: not any(replica.running for replica in world.replicas.values()))
        for replica in world.replicas.values():
            replica.publish(*(Delta(request.id, finish=Finish("abort")) for request in replica.served))
        assert [delta.finish for delta in await asyncio.gather(*reading)] == [Finish("abort")] * 4
        for stream in streams:
            await stream.aclose()

    run(test)
