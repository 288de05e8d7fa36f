"""The link over real loopback sockets, with an engine that records what it is told."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
import uvloop

from sgray.errors import ReplicaLostError, RequestTooLargeError
from sgray.protocol import (
    CacheEvent,
    Delta,
    EngineInfo,
    Finish,
    Load,
    Request,
    SamplingParams,
    StepReport,
    TokenLogprobs,
)
from sgray.serve import link as link_module
from sgray.serve.frames import LinkLimits
from sgray.serve.link import Booked, LinkServer, ReplicaLink

TOKEN = "correct horse"
INFO = EngineInfo("tiny", "/models/tiny", "LlamaForCausalLM", "float32", "cpu", 256, 512, (2,), 16, 64, 8)
LIMITS = LinkLimits(heartbeat_s=0.05, dead_after_beats=10, open_timeout_s=1.0)


class RecordingEngine:
    """Accepts everything; the test decides what is answered."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.flushes: list[Callable[[bool], None]] = []
        self.ended: list[str] = []

    def end_programs(self, programs: Sequence[str]) -> None:
        self.ended += programs

    def flush(self, done: Callable[[bool], None]) -> None:
        self.flushes.append(done)

    def submit(self, request: Request) -> None:
        self.submitted.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Seen:
    """Records what a link tells its observer."""

    def __init__(self) -> None:
        self.snapshots: list[list[int]] = []
        self.events: list[CacheEvent] = []
        self.loads: list[Load] = []
        self.lost: list[str] = []
        self.booked: list[Booked] = []
        self.ended: list[str] = []
        self.num_draining = 0

    def on_snapshot(self, hashes: list[int]) -> None:
        self.snapshots.append(hashes)

    def on_events(self, events: list[CacheEvent]) -> None:
        self.events += events

    def on_load(self, load: Load) -> None:
        self.loads.append(load)

    def on_booked(self, booked: Booked) -> None:
        self.booked.append(booked)

    def on_ended(self, request_ids: list[str]) -> None:
        self.ended += request_ids

    def on_draining(self) -> None:
        self.num_draining += 1

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)


class Pair:
    """A server, and links to it."""

    def __init__(self, limits: LinkLimits = LIMITS) -> None:
        self.engine = RecordingEngine()
        self.server = LinkServer(self.engine, INFO, TOKEN, limits)
        self.limits = limits
        self.port = 0

    async def start(self) -> Pair:
        self.port = await self.server.start("127.0.0.1")
        return self

    async def link(self, *, token: str = TOKEN, limits: LinkLimits | None = None) -> tuple[ReplicaLink, Seen]:
        seen = Seen()
        link = ReplicaLink(seen, limits or self.limits)
        await link.open("127.0.0.1", self.port, token)
        return link, seen


@pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve runs uvloop where it is installed; the two differ in what transports do."""
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)


def run(test: Callable[[Pair], Awaitable[None]], limits: LinkLimits = LIMITS) -> None:
    async def main() -> None:
        pair = await Pair(limits).start()
        try:
            await asyncio.wait_for(test(pair), 20)
        finally:
            await pair.server.close()
            await asyncio.sleep(0.02)  # the transports close

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not come true")


def report(*deltas: Delta, events: list[CacheEvent] | None = None, load: Load | None = None) -> StepReport:
    return StepReport(list(deltas), events or [], load or Load())


def test_everything_of_a_request_and_a_delta_survives_the_wire() -> None:
    request = Request(
        "r-1",
        [1, 2, 255],
        SamplingParams(temperature=0.25, logit_bias={7: -100.0, 9: 1.5}, seed=2**62, stop_token_ids=(3, 4), logprobs=2),
        priority=-3,
        salt="tenant ü",
    )
    rich = Delta(
        "r-1",
        [5, 6],
        [TokenLogprobs(-0.5, [(5, -0.5), (8, -math.inf)]), TokenLogprobs(-1.0)],
        cached_tokens=2,
        prompt_logprobs=[None, TokenLogprobs(-2.0)],
    )
    last = Delta("r-1", [2], finish=Finish("stop", matched=2))
    load = Load(running=1, waiting_tokens=17, prefill_tokens_per_s=1234.5)

    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        got: list[Delta] = []
        link.submit(request, got.append)
        await until(lambda: pair.engine.submitted)
        assert pair.engine.submitted == [request]
        pair.server.publish(report(rich, events=[CacheEvent("stored", [2**64 - 1, 0])], load=load))
        pair.server.publish(report(last))
        await until(lambda: len(got) == 2)
        assert got == [rich, last]
        assert seen.events == [CacheEvent("stored", [2**64 - 1, 0])]
        assert seen.loads[1] == load
        assert link.info == INFO
        assert (link.num_streams, pair.server.num_streams) == (0, 0)

    run(test)


def test_deltas_go_to_the_ingress_that_asked_and_events_to_all() -> None:
    async def test(pair: Pair) -> None:
        (first, seen_first), (second, seen_second) = await pair.link(), await pair.link()
        got: dict[str, list[Delta]] = {"a": [], "b": []}
        first.submit(Request("a", [1]), got["a"].append)
        second.submit(Request("b", [1]), got["b"].append)
        await until(lambda: len(pair.engine.submitted) == 2)
        pair.server.publish(report(Delta("b", [8]), Delta("a", [7]), events=[CacheEvent("stored", [11])]))
        await until(lambda: got["a"] and got["b"])
        assert ([delta.tokens for delta in got["a"]], [delta.tokens for delta in got["b"]]) == ([[7]], [[8]])
        assert seen_first.events == seen_second.events == [CacheEvent("stored", [11])]

    run(test)


def test_an_ingress_learns_at_once_what_others_gave_a_replica_and_with_a_step_that_it_is_gone() -> None:
    async def test(pair: Pair) -> None:
        (first, seen), (second, seen_by_other) = await pair.link(), await pair.link()
        pair.server.publish(report(events=[CacheEvent("stored", [1, 2])]))
        await until(lambda: seen.events)
        for name in ("a", "b", "c"):
            first.submit(Request(name, list(range(70))), lambda delta: None, [1, 2, 3, 4])
        await until(lambda: len(seen_by_other.booked) == 3)
        assert seen_by_other.booked[0] == Booked("a", 70, 2, [3, 4])
        assert seen.booked == [] and seen_by_other.ended == []
        first.abort("b")
        await until(lambda: pair.engine.aborted == ["b"])
        pair.server.publish(report(Delta("a", [5], finish=Finish("stop")), Delta("b", finish=Finish("abort"))))
        await until(lambda: len(seen_by_other.ended) == 2)
        first.close()
        await until(lambda: pair.engine.aborted == ["b", "c"])
        pair.server.publish(report(Delta("c", finish=Finish("abort"))))
        await until(lambda: seen_by_other.ended == ["b", "a", "c"], "the only one that is left learns of the last")
        assert seen.booked == [] and not pair.server._booked
        second.close()

    run(test)


def test_an_only_ingress_is_told_nothing_of_its_own_requests() -> None:
    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        got: list[Delta] = []
        link.submit(Request("a", [1]), got.append, [1])
        await until(lambda: pair.engine.submitted)
        pair.server.publish(report(Delta("a", [5], finish=Finish("stop"))))
        await until(lambda: got)
        assert (seen.booked, seen.ended) == ([], [])
        link.close()

    run(test)


def test_publish_may_be_called_from_the_engine_thread() -> None:
    async def test(pair: Pair) -> None:
        link, _ = await pair.link()
        got: list[Delta] = []
        link.submit(Request("a", [1]), got.append)
        await until(lambda: pair.engine.submitted)
        thread = threading.Thread(target=lambda: [pair.server.publish(report(Delta("a", [n]))) for n in range(200)])
        thread.start()
        await until(lambda: len(got) == 200)
        thread.join()
        assert [delta.tokens[0] for delta in got] == list(range(200))

    run(test)


def test_an_ingress_that_joins_late_gets_a_snapshot_and_then_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SNAPSHOT_HASHES", 3)  # several parts

    async def test(pair: Pair) -> None:
        pair.server.publish(report(events=[CacheEvent("stored", list(range(10)))]))
        pair.server.publish(report(events=[CacheEvent("removed", [4, 5]), CacheEvent("stored", [20])]))
        await asyncio.sleep(0.05)
        _, seen = await pair.link()
        assert [sorted(hashes) for hashes in seen.snapshots] == [[0, 1, 2, 3, 6, 7, 8, 9, 20]]
        pair.server.publish(report(events=[CacheEvent("cleared")]))
        await until(lambda: seen.events == [CacheEvent("cleared")])
        _, fresh = await pair.link()
        assert fresh.snapshots == [[]]

    run(test)


def test_a_gap_in_the_events_brings_a_new_snapshot_instead_of_a_wrong_picture() -> None:
    async def test(pair: Pair) -> None:
        _, seen = await pair.link()
        pair.server.publish(report(events=[CacheEvent("stored", [1])]))
        await until(lambda: seen.events)
        pair.server._sequence += 1  # as if a batch had been lost
        pair.server.publish(report(events=[CacheEvent("stored", [2])]))
        await until(lambda: len(seen.snapshots) == 2, "resynchronisation")
        assert sorted(seen.snapshots[1]) == [1, 2]
        pair.server.publish(report(events=[CacheEvent("stored", [3])]))
        await until(lambda: CacheEvent("stored", [3]) in seen.events)
        assert CacheEvent("stored", [2]) not in seen.events
        assert len(seen.snapshots) == 2

    run(test)


def test_abort_reaches_the_engine_and_silences_the_sink() -> None:
    async def test(pair: Pair) -> None:
        link, _ = await pair.link()
        got: list[Delta] = []
        link.submit(Request("a", [1]), got.append)
        link.abort("a")
        link.abort("unknown")
        await until(lambda: pair.engine.aborted)
        pair.server.publish(report(Delta("a", [1], finish=Finish("abort"))))
        await asyncio.sleep(0.05)
        assert (got, pair.engine.aborted, link.num_streams, pair.server.num_streams) == ([], ["a"], 0, 0)

    run(test)


def test_an_ingress_cannot_abort_or_take_over_the_request_of_another() -> None:
    async def test(pair: Pair) -> None:
        (first, _), (second, _) = await pair.link(), await pair.link()
        got: list[Delta] = []
        stolen: list[Delta] = []
        first.submit(Request("a", [1]), got.append)
        await until(lambda: pair.engine.submitted)
        second.submit(Request("a", [2]), stolen.append)
        await until(lambda: stolen)
        assert stolen[0].finish is not None
        assert stolen[0].finish.error is not None
        assert stolen[0].finish.error.status == 400
        second.submit(Request("a", [2]), stolen.append)
        second.abort("a")
        await asyncio.sleep(0.05)
        assert (pair.engine.aborted, len(pair.engine.submitted)) == ([], 1)
        pair.server.publish(report(Delta("a", [9], finish=Finish("length"))))
        await until(lambda: got)

    run(test)


def test_calls_are_stopped_by_name_for_all_ingresses_and_their_owners_are_told() -> None:
    async def test(pair: Pair) -> None:
        (first, _), (second, _) = await pair.link(), await pair.link()
        got: list[Delta] = []
        ids = ["job/c1-0", "job_1/c2-1", "jobs/c3-0", "c4-0"]
        for name in ids:
            first.submit(Request(name, [1]), got.append)
        await until(lambda: len(pair.engine.submitted) == 4)
        second.abort_calls("job")
        await until(lambda: len(pair.engine.aborted) == 2)
        assert pair.engine.aborted == ids[:2]
        pair.server.publish(report(*(Delta(name, finish=Finish("abort")) for name in ids[:2])))
        await until(lambda: len(got) == 2)
        assert [delta.finish for delta in got] == [Finish("abort")] * 2
        second.abort_calls("c4")
        await until(lambda: pair.engine.aborted[2:] == ["c4-0"])
        second.abort_calls("nobody")
        second.abort_calls(None)
        await until(lambda: pair.engine.aborted[3:] == ["jobs/c3-0", "c4-0"])

    run(test)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_flush_is_answered_after_the_step_that_tells_of_it(is_empty: bool) -> None:
    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        asked = asyncio.ensure_future(link.flush())
        await until(lambda: pair.engine.flushes)
        pair.server.publish(report(events=[CacheEvent("cleared")]))
        threading.Thread(target=pair.engine.flushes[0], args=(is_empty,)).start()
        assert await asked is is_empty
        assert seen.events == [CacheEvent("cleared")]

    run(test)


def test_nothing_is_said_to_a_replica_before_the_token() -> None:
    async def test(pair: Pair) -> None:
        link = ReplicaLink(Seen(), pair.limits)
        link.abort_calls(None)
        with pytest.raises(ReplicaLostError):
            await link.flush()
        opening = asyncio.ensure_future(link.open("127.0.0.1", pair.port, TOKEN))
        while not opening.done():
            link.abort_calls(None)
            await asyncio.sleep(0)
        await opening

    run(test)


def test_a_flush_of_a_lost_replica_is_an_error_and_not_a_wait() -> None:
    async def test(pair: Pair) -> None:
        link, _ = await pair.link()
        asked = asyncio.ensure_future(link.flush())
        await until(lambda: pair.engine.flushes)
        await pair.server.close()
        for flush in (asked, link.flush()):
            with pytest.raises(ReplicaLostError):
                await flush

    run(test)


def test_a_lost_ingress_has_its_requests_aborted_and_no_others() -> None:
    async def test(pair: Pair) -> None:
        (first, _), (second, _) = await pair.link(), await pair.link()
        for name in "abc":
            first.submit(Request(name, [1]), lambda delta: None)
        second.submit(Request("d", [1]), lambda delta: None)
        await until(lambda: len(pair.engine.submitted) == 4)
        first.close()
        await until(lambda: len(pair.engine.aborted) == 3)
        assert sorted(pair.engine.aborted) == ["a", "b", "c"]
        assert pair.server.num_streams == 1

    run(test)


def test_a_lost_replica_answers_every_stream_with_an_error_once() -> None:
    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        got: list[Delta] = []
        link.submit(Request("a", [1]), got.append)
        link.submit(Request("b", [1]), got.append)
        await until(lambda: len(pair.engine.submitted) == 2)
        await pair.server.close()
        await until(lambda: len(got) == 2)
        link.submit(Request("c", [1]), got.append)
        assert [delta.id for delta in got] == ["a", "b", "c"]
        for delta in got:
            assert delta.finish is not None
            assert delta.finish.error is not None
            assert delta.finish.error.code == "replica_lost"
        assert len(seen.lost) == 1
        assert not link.is_open

    run(test)


def test_a_draining_replica_refuses_new_requests_and_goes_on_with_the_old() -> None:
    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        old: list[Delta] = []
        new: list[Delta] = []
        link.submit(Request("old", [1]), old.append)
        await until(lambda: pair.engine.submitted)
        pair.server.drain()
        link.submit(Request("new", [1]), new.append)
        await until(lambda: new)
        assert new[0].finish is not None
        assert new[0].finish.error is not None
        assert (new[0].finish.error.status, new[0].finish.error.code) == (503, "replica_draining")
        assert seen.num_draining == 1
        _, late = await pair.link()
        await until(lambda: late.num_draining, "an ingress that comes now is told as well")
        assert pair.server.num_streams == 1
        pair.server.publish(report(Delta("old", [1], finish=Finish("length"))))
        await until(lambda: old)
        assert pair.server.num_streams == 0

    run(test)


@pytest.mark.parametrize("token", ["wrong", "", TOKEN + "x", "ü"])
def test_a_wrong_token_is_turned_away(token: str) -> None:
    async def test(pair: Pair) -> None:
        with pytest.raises(ReplicaLostError):
            await pair.link(token=token)
        assert pair.engine.submitted == []

    run(test)


async def _raw(pair: Pair, payload: bytes) -> bytes:
    """Send bytes without a link and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
    try:
        writer.write(payload)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(_framed(msgspec.msgpack.encode(["submit", {"id": "x", "tokens": [1]}])), id="submit before open"),
        pytest.param(_framed(b"\xc1garbage"), id="not msgpack"),
        pytest.param(_framed(msgspec.msgpack.encode(["open", "1", 2])), id="wrong types"),
        pytest.param(_framed(msgspec.msgpack.encode(["open", 999, TOKEN])), id="another version"),
        pytest.param((4097).to_bytes(4, "little"), id="too large before the token"),
        pytest.param((2**32 - 1).to_bytes(4, "little"), id="absurd length"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(b"\x01", id="half a header, then silence"),
    ],
)
def test_a_stranger_is_cut_off_and_learns_nothing(payload: bytes) -> None:
    async def test(pair: Pair) -> None:
        answer = await _raw(pair, payload)
        # Heartbeats are empty frames; nothing else may come.
        assert answer.strip(b"\x00") == b""
        assert pair.engine.submitted == []
        link, _ = await pair.link()
        assert link.is_open, "the server still serves others"

    run(test)


def test_a_frame_in_many_pieces_is_put_together() -> None:
    async def test(pair: Pair) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", pair.port)
        frames = _framed(msgspec.msgpack.encode(["open", link_module.VERSION, TOKEN]))
        frames += _framed(msgspec.msgpack.encode(["submit", {"id": "x", "tokens": [1, 2]}]))
        for byte in frames:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await until(lambda: pair.engine.submitted)
        assert pair.engine.submitted[0] == Request("x", [1, 2])
        writer.close()

    run(test)


def test_heartbeats_keep_an_idle_link_and_silence_ends_it() -> None:
    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        await asyncio.sleep(1.0)
        assert link.is_open, "idle for twice the limit, but with heartbeats"
        for peer in pair.server._peers:
            # The other host is gone without a word: it neither sends nor closes.
            peer.connection._transport.pause_reading()  # type: ignore[union-attr]
            peer.connection._beat_timer.cancel()  # type: ignore[union-attr]
        await until(lambda: seen.lost, "detection of a dead peer")
        assert "heartbeats" in seen.lost[0]

    run(test, replace(LIMITS, dead_after_beats=10))


def test_a_stalled_process_does_not_take_its_peer_for_dead() -> None:
    async def test(pair: Pair) -> None:
        import time

        link, seen = await pair.link()
        time.sleep(1.0)  # both ends stall for twice the limit
        await asyncio.sleep(0.2)
        assert link.is_open
        assert seen.lost == []

    run(test)


def test_an_ingress_that_does_not_read_is_dropped_instead_of_buffered_for() -> None:
    limits = replace(LIMITS, max_buffered_bytes=200_000, dead_after_beats=10_000)

    async def test(pair: Pair) -> None:
        (stuck, _), (well, _) = await pair.link(), await pair.link()
        got: list[Delta] = []
        stuck.submit(Request("stuck", [1]), lambda delta: None)
        well.submit(Request("well", [1]), got.append)
        await until(lambda: len(pair.engine.submitted) == 2)
        stuck._connection._transport.pause_reading()  # type: ignore[union-attr]
        tokens = list(range(20_000))
        for _ in range(400):
            pair.server.publish(report(Delta("stuck", tokens), Delta("well", [1])))
            await asyncio.sleep(0.002)
            if pair.engine.aborted:
                break
        assert pair.engine.aborted == ["stuck"]
        await asyncio.sleep(0.05)
        assert well.is_open
        assert got
        stuck.close()

    run(test, limits)


def test_an_answer_too_large_for_a_frame_fails_alone() -> None:
    limits = replace(LIMITS, max_frame_bytes=20_000)

    async def test(pair: Pair) -> None:
        link, seen = await pair.link()
        got: dict[str, list[Delta]] = {"big": [], "small": []}
        link.submit(Request("big", [1]), got["big"].append)
        link.submit(Request("small", [1]), got["small"].append)
        await until(lambda: len(pair.engine.submitted) == 2)
        big = Delta("big", list(range(30_000)))
        pair.server.publish(report(Delta("small", [1]), big, events=[CacheEvent("stored", [1])]))
        await until(lambda: got["big"] and got["small"])
        assert got["small"][0].tokens == [1]
        assert got["big"][0].finish is not None
        assert got["big"][0].finish.error is not None
        assert got["big"][0].finish.error.status == 413
        assert pair.engine.aborted == ["big"]
        assert (seen.events, len(seen.snapshots)) == ([CacheEvent("stored", [1])], 1)

    run(test, limits)


def test_a_request_too_large_for_the_link_is_refused_before_it_is_sent() -> None:
    async def test(pair: Pair) -> None:
        link, _ = await pair.link()
        with pytest.raises(RequestTooLargeError):
            link.submit(Request("a", list(range(30_000))), lambda delta: None)
        assert link.is_open
        assert link.num_streams == 0

    run(test, replace(LIMITS, max_frame_bytes=20_000))


def test_a_port_where_nobody_listens_is_an_error_and_not_a_wait() -> None:
    async def test(pair: Pair) -> None:
        with pytest.raises(OSError):
            await ReplicaLink(Seen(), LIMITS).open("127.0.0.1", 1, TOKEN)

    run(test)


def test_a_server_that_says_nothing_is_given_up() -> None:
    async def test(pair: Pair) -> None:
        async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        silent = await asyncio.start_server(ignore, "127.0.0.1", 0)
        limits = replace(LIMITS, open_timeout_s=0.2)
        with pytest.raises(ReplicaLostError, match="did not open in time"):
            await ReplicaLink(Seen(), limits).open("127.0.0.1", silent.sockets[0].getsockname()[1], TOKEN)
        silent.close()

    run(test)


def test_the_end_of_a_program_reaches_the_engine_whoever_tells() -> None:
    async def test(pair: Pair) -> None:
        (first, _), (second, _) = await pair.link(), await pair.link()
        first.submit(Request("a", [1], program="p"), lambda delta: None)
        await until(lambda: pair.engine.submitted)
        assert pair.engine.submitted[0].program == "p"
        second.end_programs(("p", "q"))
        await until(lambda: pair.engine.ended)
        assert pair.engine.ended == ["p", "q"]

    run(test)
