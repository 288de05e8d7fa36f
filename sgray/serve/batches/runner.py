"""Works on batches: one at a time, some of its rows in flight. Knows no HTTP, and of a model only a function.

Whatever happens to this process, the store knows which rows have answers; who takes the lease next goes on with the
others. A row that was being computed when its process died is computed again, and answered once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from sgray.config import Config
from sgray.errors import EngineError, OverloadedError, ReplicaLostError, SgrayError
from sgray.serve.batches.lines import FaultyFileError, read_rows
from sgray.serve.batches.records import BatchRecord, Row
from sgray.serve.batches.store import LeaseLostError, Store

logger = logging.getLogger(__name__)

Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""From an endpoint and a body to the whole answer; raises a SgrayError where there is none."""

LOWEST_PRIORITY = -(2**31)
_MAX_LOST = 3  # times that a row may lose its replica or its step before it is the row that is to blame
_FIRST_WAIT_S, _MAX_WAIT_S = 0.05, 5.0
_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


@dataclass(frozen=True)
class Pace:
    """How often a runner looks for work, how long its lease is, and how many rows it has in flight. Seconds."""

    rows_in_flight: int
    lease_s: float = 15.0
    look_s: float = 1.0


class Runner:
    """Runs the batches of a store, in the event loop in which `start` was called.

    `has_slack` says whether a replica could begin a row now; rows in flight go on in any case, at the lowest priority.
    """

    def __init__(self, store: Store, ask: Ask, has_slack: Callable[[], bool], config: Config, pace: Pace) -> None:
        self._store = store
        self._ask = ask
        self._has_slack = has_slack
        self._limits = {"max_line_bytes": config.api.max_body_bytes, "max_depth": config.api.max_json_depth}
        self._pace = pace
        self._owner = uuid.uuid4().hex
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it runs already, and look for work now."""
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop. What was in flight is left to whoever takes the lease, which is given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        """Batch after batch, for ever. A failure of the database, or of this file, is logged and tried again."""
        while True:
            self._news.clear()
            try:
                await asyncio.to_thread(self._store.purge)
                batch = await asyncio.to_thread(self._store.claim, self._owner, self._pace.lease_s)
                if batch is not None:
                    await self._hold(batch)
                    continue
            except Exception as error:
                logger.error("batches: %s", error, exc_info=None if isinstance(error, SgrayError) else error)
            await _first_of(self._news.wait(), self._pace.look_s)

    async def _hold(self, batch: BatchRecord) -> None:
        """Carry a batch to its end, or as far as the lease lasts."""
        try:
            await self._carry(batch)
        except LeaseLostError:
            logger.warning("batch %s: another process has taken it over", batch.id)
        except BaseException:
            await asyncio.to_thread(self._store.release, batch.id, self._owner)
            raise

    async def _carry(self, batch: BatchRecord) -> None:
        if batch.status == "validating":
            batch = await self._guarded(batch, self._validate(batch))
        if batch.status == "in_progress":
            batch = await self._guarded(batch, self._rows(batch))
        if batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.to_thread(self._store.finalize, batch.id, self._owner)
            batch = await asyncio.to_thread(self._store.finish, batch.id, self._owner, _expired_answer)
            logger.info("batch %s: %s, %d rows, %d failed", batch.id, batch.status, batch.total, batch.failed)

    async def _guarded(self, batch: BatchRecord, work: Coroutine[Any, Any, None]) -> BatchRecord:
        """The batch after this work, which is stopped when the batch is cancelled or its time is over."""
        task = asyncio.ensure_future(work)
        try:
            while batch.status != "cancelling" and batch.expires_at > self._store.now():
                if await _first_of(task, min(self._pace.lease_s / 3, 1.0)):
                    task.result()
                    return await asyncio.to_thread(self._store.batch, batch.id)
                batch = await asyncio.to_thread(self._store.renew, batch.id, self._owner, self._pace.lease_s)
            return batch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _validate(self, batch: BatchRecord) -> None:
        """Rows of the input file, or the batch's end with what is wrong with it."""

        def validate() -> None:
            try:
                rows = read_rows(self._store.content(batch.input_file_id), batch.endpoint, **self._limits)
                self._store.begin(batch.id, self._owner, rows)
            except FaultyFileError as error:
                self._store.fail(batch.id, self._owner, error.faults)

        await asyncio.to_thread(validate)

    async def _rows(self, batch: BatchRecord) -> None:
        """Answer every row that has no answer; returns when all have one. The first failure ends all."""
        feed = _Feed(self._store, batch.id, 2 * self._pace.rows_in_flight)
        tasks = [asyncio.ensure_future(self._answer_some(batch, feed)) for _ in range(self._pace.rows_in_flight)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_some(self, batch: BatchRecord, feed: _Feed) -> None:
        while (row := await feed.next()) is not None:
            answer, is_good = await self._answered(batch.endpoint, row)
            await asyncio.to_thread(self._store.answer, batch.id, self._owner, row.number, answer, is_good=is_good)

    async def _answered(self, endpoint: str, row: Row) -> tuple[str, bool]:
        """A row's line in the output file, or in the error file. A full server is waited for, as long as it takes."""
        body = json.loads(row.body) | {"priority": LOWEST_PRIORITY}
        num_lost, wait_s = 0, _FIRST_WAIT_S
        while True:
            try:
                await self._slack()
                return _line(row.custom_id, 200, await self._ask(endpoint, body)), True
            except OverloadedError:
                pass
            except (ReplicaLostError, EngineError) as error:
                num_lost += 1
                if num_lost == _MAX_LOST:
                    return _line(row.custom_id, error.status, error.body()), False
            except SgrayError as error:
                return _line(row.custom_id, error.status, error.body()), False
            except Exception as error:  # one row's fault must not be the others'
                logger.error("a row failed: internal error", exc_info=error)
                mistake = SgrayError("The server made a mistake; its log has the details.", code="internal_error")
                return _line(row.custom_id, mistake.status, mistake.body()), False
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    async def _slack(self) -> None:
        while not self._has_slack():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(_FIRST_WAIT_S)


class _Feed:
    """The rows without an answer, each handed out once."""

    def __init__(self, store: Store, batch_id: str, num_ahead: int) -> None:
        self._store = store
        self._batch_id = batch_id
        self._num_ahead = num_ahead
        self._lock = asyncio.Lock()
        self._rows: list[Row] = []
        self._last = 0

    async def next(self) -> Row | None:
        """The next row; None when there is no other."""
        async with self._lock:
            if not self._rows:
                found = await asyncio.to_thread(self._store.unanswered, self._batch_id, self._last, self._num_ahead)
                self._rows = found[::-1]
            if not self._rows:
                return None
            row = self._rows.pop()
            self._last = row.number
            return row


async def _first_of(work: Awaitable[Any], seconds: float) -> bool:
    """Whether `work` ended in so many seconds. Work that is no future is stopped otherwise."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        return task.done()
    finally:
        if task is not work:
            task.cancel()


def _line(custom_id: str, status: int, body: Any) -> str:
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return _answer(custom_id, response=response, error=None)


def _expired_answer(row: Row) -> str:
    code, message = _EXPIRED
    return _answer(row.custom_id, response=None, error={"code": code, "message": message})


def _answer(custom_id: str, *, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> str:
    """One line of an output or error file. ASCII, so that no character of a text can end it."""
    identity = f"batch_req_{uuid.uuid4().hex}"
    return json.dumps({"id": identity, "custom_id": custom_id, "response": response, "error": error})
