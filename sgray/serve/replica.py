"""The engine replica: an actor of Serve that holds one engine, its loop and the link server.

Serve starts, watches and stops it; requests come over the link alone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
from typing import Any

import ray

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.engine.loop import EngineLoop
from sgray.errors import SgrayError
from sgray.protocol import StepReport
from sgray.serve.link import LinkServer
from sgray.serve.load_meter import LoadMeter
from sgray.serve.ranks import FurtherNodes
from sgray.serve.table import Endpoint
from sgray.serve.tracing import spans_of

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
LOST_POLL_S = 0.25
HAND_OVER_S = 10.0  # before Serve's time limit, or in its last quarter, streams that still run are handed over
FIRST_STEPS_S = 60.0  # while an engine's speed is not known: what its first steps need is compiled in them
PATIENCE = 10.0
SWITCH_INTERVAL_S = 0.0005


class LLMReplica:
    """One engine. `values` are those of a `Config`."""

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._has_started = False
        config = Config.parse(values)
        self._wedge_timeout_s = config.serve.wedge_timeout_s
        limit_s = config.serve.graceful_shutdown_timeout_s
        self._drain_s = limit_s - min(HAND_OVER_S, limit_s / 4)
        self._suspected: str | None = None
        self._lost: str | None = None  # why the links are cut, after which there is no way back
        self._loop = asyncio.get_running_loop()
        self._spans = spans_of(config, "replica")
        self._nodes = FurtherNodes(config) if config.parallel.nnodes > 1 else None  # they end with this object
        # Minutes for a large model; this loop stays responsive.
        engine = await asyncio.to_thread(_load, config, self._nodes)
        self._engine_loop = EngineLoop(engine, self._publish)
        self._step_tokens = engine.limits.token_budget
        token = secrets.token_urlsafe(32)
        self._server = LinkServer(self._engine_loop, engine.info, token)
        self._meter = LoadMeter(engine.info, engine.limits.mixed)
        # This process is two threads that take turns: the one that plans steps, and this one, which sends their
        # tokens. Neither should wait for the other as long as Python's default of 5 ms, which is a whole step.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        host = ray.util.get_node_ip_address()
        self._endpoint = Endpoint(host, await self._server.start(host), token)
        self._engine_loop.start()
        self._watch = asyncio.create_task(self._end_when_lost())
        self._has_started = True
        logger.info("engine ready: %s", engine.info)

    async def ping(self) -> None:
        """Answer; a call that waits for a replica also makes Serve start one."""

    def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Serve once: what ingresses need to reach this replica."""
        return self._endpoint.as_metadata()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve again and again."""
        return self._meter.read(self._server.load, self._server.num_streams)

    async def check_health(self) -> None:
        """Called by Serve again and again; raises when this replica should be replaced.

        Serve asks three times before it believes that; the links are cut the second time, and streams go on elsewhere.
        Not the first time: a process that was stopped for a while has its first check before its first step.
        """
        fault = self._fault()
        if fault is not None and self._suspected is not None:
            self._lost = fault
            await self._server.close()
        self._suspected = fault
        if self._lost or fault:
            raise RuntimeError(self._lost or fault)

    async def __del__(self) -> None:
        """Called by Serve before the end: take nothing new, finish what runs, and hand over what takes too long."""
        if not self._has_started:
            return  # loading failed, which Serve has been told
        self._watch.cancel()
        self._server.drain()
        clock = asyncio.get_running_loop().time
        end = clock() + self._drain_s
        while self._server.num_streams and clock() < end and self._fault() is None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(DRAIN_POLL_S)
        if self._server.num_streams:
            logger.warning("%d streams have to go on at other replicas", self._server.num_streams)
        await self._server.close()
        if self._fault() is None:
            await asyncio.to_thread(self._engine_loop.stop)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def _end_when_lost(self) -> None:
        """End this process once its engine will do no more work: Serve replaces a dead replica at its next look.

        It would wait for three bad answers of one that still answers.
        """
        while not (health := self._engine_loop.health()).is_lost:  # noqa: ASYNC110 - a fault may come of any thread
            await asyncio.sleep(LOST_POLL_S)
        logger.critical("this replica ends, for its engine can compute no more: %s", health.error)
        await self._server.close()  # its streams go on at other replicas
        await asyncio.sleep(LOST_POLL_S)  # what it has still to say is sent
        end_process()

    def _publish(self, report: StepReport) -> None:
        """Called by the engine's thread, which is not to make spans: its next step waits."""
        self._server.publish(report)
        if report.trails and self._spans is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spans.record, report.trails)

    def _fault(self) -> str | None:
        """Why this engine will do no more work, if so."""
        health = self._engine_loop.health()
        if not health.alive:
            return "the engine's thread is dead"
        if health.is_lost:
            return f"the engine can compute no more: {health.error}"  # and this process is about to end
        if health.busy and health.last_step_age_s > self._patience_s(health.slow_step_s):
            return f"work is waiting and no step has ended for {health.last_step_age_s:.0f} s"
        return None

    def _patience_s(self, slow_step_s: float) -> float:
        """How long a step may take: ten times as long as slow ones do, or as a step full of prompt should."""
        tokens_per_s = self._server.load.prefill_tokens_per_s
        if not tokens_per_s:
            return max(self._wedge_timeout_s, FIRST_STEPS_S)
        return max(self._wedge_timeout_s, PATIENCE * max(slow_step_s, self._step_tokens / tokens_per_s))


def end_process() -> None:
    """At once: threads and other ranks may be stuck, and would be waited for."""
    os._exit(1)


def _load(config: Config, nodes: FurtherNodes | None) -> Engine:
    """The engine, with this replica's share of the cores that the ingress and the proxy leave.

    Threads that outnumber the cores are worse than few: in each product all wait for the one that is not running.
    """
    from sgray.engine.executor import measure_hardware  # torch, which whoever builds the application does not need

    if config.model.num_threads == "auto":
        share = (measure_hardware().num_threads - 1) // max(1, config.serve.min_replicas)
        num_threads = max(1, share, int(config.num_reserved_cpus))
        config = config.model_copy(update={"model": config.model.model_copy(update={"num_threads": num_threads})})
    engine = Engine.load(config, nodes)
    try:
        engine.prepare_grammars()  # imports and reads files for seconds, and holds up every thread meanwhile
    except SgrayError as error:
        logger.warning("requests with a grammar will be refused: %s", error)
    gc.collect()
    gc.freeze()  # what was loaded stays, and is many objects for the collector to walk over between two steps
    return engine
