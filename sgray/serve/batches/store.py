"""Files, batches and rows in one SQLite database. Knows no HTTP and no engine; the time is an argument of its maker.

Several processes of one node may use the database at once. Each act is one transaction, so that a process can be killed
between any two of them. Whoever works on a batch holds its lease, which lapses when it is not renewed; every act of the
work checks the lease in its own transaction, so that one who lost it without knowing can change nothing.

A row's answer is written once, beside its custom_id. Output files are no files: they are the answers, read in the order
of the rows.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from sgray.errors import ConfigError, InvalidRequestError, NotFoundError, RequestTooLargeError, SgrayError, StorageError
from sgray.serve.batches.records import ACTIVE, BatchRecord, FileRecord, LineFault, Row
from sgray.serve.openai.validate import shown

DATABASE = "batches.sqlite3"
PART_BYTES = 2**20
_VERSION = 1
_BUSY_S = 30.0
_PAGE_ROWS = 64
_ACTIVE = ", ".join(f"'{status}'" for status in ACTIVE)
_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, purpose TEXT NOT NULL, filename TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER, batch_id TEXT, is_good INTEGER
);
CREATE TABLE parts (file_id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file_id, number));
CREATE TABLE batches (
    id TEXT PRIMARY KEY, status TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, metadata TEXT NOT NULL,
    output_seconds INTEGER, times TEXT NOT NULL DEFAULT '{}', faults TEXT NOT NULL DEFAULT '[]',
    output_file_id TEXT, error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE rows (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT, answer TEXT, is_good INTEGER,
    PRIMARY KEY (batch_id, number), UNIQUE (batch_id, custom_id)
);
CREATE TABLE leases (batch_id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires_at REAL NOT NULL);
"""
_FILE_COLUMNS = "id, purpose, filename, num_bytes, created_at, expires_at"
_BATCH_COLUMNS = ", ".join(BatchRecord.__dataclass_fields__)


class LeaseLostError(Exception):
    """Somebody else works on the batch, or nobody has to any more."""


class Store:
    """The database in one directory. Functions block, and may be called from any thread."""

    def __init__(self, directory: Path, *, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        """Raises ConfigError where the directory cannot hold the database. `max_bytes`: all uploads together."""
        self.now = now
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._connection = _opened(directory)

    def close(self) -> None:
        """Give the database back; nothing may be called afterwards."""
        with self._lock:
            self._connection.close()

    # Files.

    def add_file(
        self, filename: str, parts: Iterable[bytes], *, purpose: str = "batch", keep_s: int | None = None
    ) -> FileRecord:
        """Keep a file, given in parts, for `keep_s` seconds or until it is deleted."""
        now = int(self.now())
        name, size = f"file-{uuid.uuid4().hex}", 0
        expires_at = None if keep_s is None else now + keep_s
        with self._change() as database:
            (held,) = database.execute(
                "SELECT coalesce(sum(num_bytes), 0) FROM files WHERE purpose = 'batch'"
            ).fetchone()
            for number, part in enumerate(parts):
                size += len(part)
                if held + size > self._max_bytes:
                    raise RequestTooLargeError(
                        f"All files together may have {self._max_bytes} bytes, and have {held} already; delete some."
                    )
                database.execute("INSERT INTO parts VALUES (?, ?, ?)", (name, number, part))
            row = (name, purpose, filename, size, now, expires_at)
            database.execute(f"INSERT INTO files ({_FILE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row)  # noqa: S608
        return FileRecord(*row)

    def file(self, name: str) -> FileRecord:
        """One file; raises NotFoundError."""
        with self._read() as database:
            return FileRecord(*self._file(database, name))

    def files(
        self, *, purpose: str | None = None, after: str | None = None, limit: int = 100, newest_first: bool = True
    ) -> tuple[list[FileRecord], bool]:
        """Files by age behind the one with the id `after`, at most `limit`, and whether there are more."""
        alive = "(expires_at IS NULL OR expires_at > ?) AND (? IS NULL OR purpose = ?)"
        found, has_more = self._page(
            "files", _FILE_COLUMNS, alive, (int(self.now()), purpose, purpose), after, limit, newest_first
        )
        return [FileRecord(*row) for row in found], has_more

    def delete_file(self, name: str) -> None:
        """Forget a file and what it holds; raises NotFoundError."""
        with self._change() as database:
            self._file(database, name)
            _delete(database, name)

    def content(self, name: str) -> Iterator[bytes]:
        """The bytes of a file, in parts. Raises NotFoundError before the first."""
        with self._read() as database:
            self._file(database, name)
            batch_id, is_good = database.execute("SELECT batch_id, is_good FROM files WHERE id = ?", (name,)).fetchone()
        return self._parts(name) if batch_id is None else self._answers(batch_id, is_good)

    # Batches, as their clients see them.

    def add_batch(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        window: str,
        window_s: int,
        metadata: dict[str, str] | None = None,
        output_seconds: int | None = None,
    ) -> BatchRecord:
        """A new batch, to be validated. Raises InvalidRequestError where the file is none that it could have."""
        now, name = int(self.now()), f"batch_{uuid.uuid4().hex}"
        with self._change() as database:
            try:
                file = FileRecord(*self._file(database, input_file_id))
            except NotFoundError as error:
                raise InvalidRequestError(error.message, param="input_file_id", code="invalid_value") from None
            if file.purpose != "batch":
                message = f"The purpose of {shown(file.id)} is {shown(file.purpose)}, not 'batch'."
                raise InvalidRequestError(message, param="input_file_id", code="invalid_value")
            database.execute(
                "INSERT INTO batches (id, status, endpoint, input_file_id, completion_window, created_at, expires_at,"
                " metadata, output_seconds) VALUES (?, 'validating', ?, ?, ?, ?, ?, ?, ?)",
                (name, endpoint, input_file_id, window, now, now + window_s, json.dumps(metadata), output_seconds),
            )
            return _batch(database, name)

    def batch(self, name: str) -> BatchRecord:
        """One batch; raises NotFoundError."""
        with self._read() as database:
            return _batch(database, name)

    def batches(self, *, after: str | None = None, limit: int = 20) -> tuple[list[BatchRecord], bool]:
        """Batches, the newest first, behind the one with the id `after`, and whether there are more."""
        found, has_more = self._page("batches", _BATCH_COLUMNS, "1", (), after, limit, True)
        return [_as_batch(row) for row in found], has_more

    def cancel(self, name: str) -> BatchRecord:
        """Ask for the end of a batch; raises InvalidRequestError where it has ended. Twice is as good as once."""
        with self._change() as database:
            batch = _batch(database, name)
            if batch.status not in ACTIVE:
                message = f"A batch with the status {shown(batch.status)} cannot be cancelled."
                raise InvalidRequestError(message, code="invalid_value")
            return batch if batch.status == "cancelling" else self._enter(database, batch, "cancelling")

    # The work on a batch, under a lease.

    def claim(self, owner: str, lease_s: float) -> BatchRecord | None:
        """Take the lease of the oldest batch that has work and no owner; None where there is none."""
        now = self.now()
        with self._change() as database:
            found = database.execute(
                f"SELECT id FROM batches LEFT JOIN leases ON batch_id = id WHERE status IN ({_ACTIVE})"  # noqa: S608
                " AND (owner IS NULL OR owner = ? OR leases.expires_at <= ?) ORDER BY batches.rowid LIMIT 1",
                (owner, now),
            ).fetchone()
            if found is None:
                return None
            database.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (found[0], owner, now + lease_s))
            return _batch(database, found[0])

    def renew(self, name: str, owner: str, lease_s: float) -> BatchRecord:
        """Hold the lease for longer; the batch as it now is. Raises LeaseLostError."""
        with self._change() as database:
            batch = _owned(database, name, owner)
            database.execute("UPDATE leases SET expires_at = ? WHERE batch_id = ?", (self.now() + lease_s, name))
            return batch

    def release(self, name: str, owner: str) -> None:
        """Give the lease up, so that another can take it at once."""
        with self._change() as database:
            database.execute("DELETE FROM leases WHERE batch_id = ? AND owner = ?", (name, owner))

    def begin(self, name: str, owner: str, rows: Sequence[Row]) -> BatchRecord:
        """The rows of a validated batch."""
        with self._change() as database:
            batch = _owned(database, name, owner)
            if batch.status != "validating":
                return batch
            database.executemany(
                "INSERT INTO rows (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)",
                ((name, row.number, row.custom_id, row.body) for row in rows),
            )
            database.execute("UPDATE batches SET total = ? WHERE id = ?", (len(rows), name))
            return self._enter(database, batch, "in_progress")

    def fail(self, name: str, owner: str, faults: Sequence[LineFault]) -> BatchRecord:
        """The end of a batch that cannot run, with the reasons."""
        with self._change() as database:
            batch = _owned(database, name, owner)
            faulty = json.dumps([asdict(fault) for fault in faults])
            database.execute("UPDATE batches SET faults = ? WHERE id = ?", (faulty, name))
            return self._ended(database, batch, "cancelled" if batch.status == "cancelling" else "failed")

    def unanswered(self, name: str, after: int, limit: int) -> list[Row]:
        """Rows without an answer behind the number `after`, in order."""
        with self._read() as database:
            found = database.execute(
                "SELECT number, custom_id, body FROM rows WHERE batch_id = ? AND number > ? AND answer IS NULL"
                " ORDER BY number LIMIT ?",
                (name, after, limit),
            ).fetchall()
        return [Row(*one) for one in found]

    def answer(self, name: str, owner: str, number: int, answer: str, *, is_good: bool) -> None:
        """Keep a row's answer, one line of JSON, unless it has one. Raises LeaseLostError."""
        with self._change() as database:
            _owned(database, name, owner)
            changed = database.execute(
                "UPDATE rows SET answer = ?, is_good = ?, body = NULL"
                " WHERE batch_id = ? AND number = ? AND answer IS NULL",
                (answer, is_good, name, number),
            ).rowcount
            if changed:
                column = "completed" if is_good else "failed"
                database.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (name,))  # noqa: S608

    def finalize(self, name: str, owner: str) -> BatchRecord:
        """No row runs any more."""
        with self._change() as database:
            batch = _owned(database, name, owner)
            return self._enter(database, batch, "finalizing") if batch.status == "in_progress" else batch

    def finish(self, name: str, owner: str, rest: Callable[[Row], str]) -> BatchRecord:
        """The end of a batch in which no row runs: completed, cancelled, or, where rows are left, expired.

        `rest` writes the answer of a row that had no time left.
        """
        with self._change() as database:
            batch = _owned(database, name, owner)
            left = database.execute(
                "SELECT number, custom_id, '' FROM rows WHERE batch_id = ? AND answer IS NULL", (name,)
            ).fetchall()
            is_cancelled, is_late = batch.status == "cancelling", bool(left) or batch.status == "validating"
            if is_late and not is_cancelled:
                database.executemany(
                    "UPDATE rows SET answer = ?, is_good = 0 WHERE batch_id = ? AND number = ?",
                    [(rest(Row(*one)), name, one[0]) for one in left],
                )
                database.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(left), name))
            database.execute("DELETE FROM rows WHERE batch_id = ? AND answer IS NULL", (name,))
            self._add_outputs(database, batch)
            return self._ended(database, batch, "cancelled" if is_cancelled else "expired" if is_late else "completed")

    def purge(self) -> None:
        """Forget files whose time is over."""
        now = int(self.now())
        with self._read() as database:
            old = database.execute("SELECT id FROM files WHERE expires_at <= ? LIMIT 100", (now,)).fetchall()
        for (name,) in old:
            with self._change() as database:
                _delete(database, name)

    # Inside.

    def _add_outputs(self, database: sqlite3.Connection, batch: BatchRecord) -> None:
        now = int(self.now())
        expires_at = None if batch.output_seconds is None else now + batch.output_seconds
        for is_good, kind in ((1, "output"), (0, "error")):
            count, size = database.execute(
                "SELECT count(*), coalesce(sum(length(CAST(answer AS BLOB)) + 1), 0) FROM rows"
                " WHERE batch_id = ? AND is_good = ?",
                (batch.id, is_good),
            ).fetchone()
            if not count:
                continue
            name, filename = f"file-{uuid.uuid4().hex}", f"{batch.id}_{kind}.jsonl"
            database.execute(
                f"INSERT INTO files ({_FILE_COLUMNS}, batch_id, is_good) VALUES (?, 'batch_output', ?, ?, ?, ?, ?, ?)",  # noqa: S608
                (name, filename, size, now, expires_at, batch.id, is_good),
            )
            database.execute(f"UPDATE batches SET {kind}_file_id = ? WHERE id = ?", (name, batch.id))  # noqa: S608

    def _enter(self, database: sqlite3.Connection, batch: BatchRecord, status: str) -> BatchRecord:
        times = batch.times | {f"{status}_at": int(self.now())}
        database.execute("UPDATE batches SET status = ?, times = ? WHERE id = ?", (status, json.dumps(times), batch.id))
        return _batch(database, batch.id)

    def _ended(self, database: sqlite3.Connection, batch: BatchRecord, status: str) -> BatchRecord:
        database.execute("DELETE FROM leases WHERE batch_id = ?", (batch.id,))
        return self._enter(database, batch, status)

    def _file(self, database: sqlite3.Connection, name: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] | None = database.execute(
            f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND (expires_at IS NULL OR expires_at > ?)",  # noqa: S608
            (name, int(self.now())),
        ).fetchone()
        if found is None:
            raise NotFoundError(f"There is no file {shown(name)}.")
        return found

    def _page(
        self, table: str, columns: str, where: str, values: tuple[Any, ...], after: str | None, limit: int, down: bool
    ) -> tuple[list[tuple[Any, ...]], bool]:
        """Rows of a table by age, and whether there are more. The names in the query are this file's own."""
        with self._read() as database:
            if after is not None:
                found = database.execute(f"SELECT rowid FROM {table} WHERE id = ?", (after,)).fetchone()  # noqa: S608
                if found is None:
                    message = f"Invalid value for 'after': there is no {shown(after)}."
                    raise InvalidRequestError(message, param="after", code="invalid_value")
                where, values = f"{where} AND rowid {'<' if down else '>'} ?", (*values, found[0])
            rows = database.execute(
                f"SELECT {columns} FROM {table} WHERE {where} ORDER BY rowid {'DESC' if down else 'ASC'} LIMIT ?",  # noqa: S608
                (*values, limit + 1),
            ).fetchall()
        return rows[:limit], len(rows) > limit

    def _parts(self, name: str) -> Iterator[bytes]:
        number = 0
        while True:
            with self._read() as database:
                found = database.execute(
                    "SELECT data FROM parts WHERE file_id = ? AND number = ?", (name, number)
                ).fetchone()
            if found is None:
                return
            yield found[0]
            number += 1

    def _answers(self, batch_id: str, is_good: int) -> Iterator[bytes]:
        number = 0
        while True:
            with self._read() as database:
                found = database.execute(
                    "SELECT number, answer FROM rows WHERE batch_id = ? AND is_good = ? AND number > ?"
                    " ORDER BY number LIMIT ?",
                    (batch_id, is_good, number, _PAGE_ROWS),
                ).fetchall()
            if not found:
                return
            yield "".join(f"{answer}\n" for _, answer in found).encode()
            number = found[-1][0]

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _explained():
            yield self._connection

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can come between; rolled back where it fails."""
        with self._lock, _explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


def _opened(directory: Path) -> sqlite3.Connection:
    """The database of a directory, made where there is none."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(directory / f"{DATABASE}.lock", timeout=_BUSY_S):
            return _connected(directory / DATABASE)
    except (OSError, sqlite3.Error) as error:  # a lock that is not given in time is an OSError, too
        raise ConfigError(
            f"batches.batches_dir: {directory} cannot hold the database of batches: {error}. "
            "It must be writable and on a disk of this node."
        ) from None


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError("its file system has no shared memory, which a write-ahead log needs")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"version {version} is there, and this release knows {_VERSION}")
        if version == 0:
            for statement in _SCHEMA.split(";")[:-1]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _explained() -> Iterator[None]:
    """Failures of the database as errors that a user understands."""
    try:
        yield
    except SgrayError:
        raise
    except sqlite3.Error as error:
        raise StorageError(f"The database of batches cannot be used now: {error}.") from error


def _batch(database: sqlite3.Connection, name: str) -> BatchRecord:
    found = database.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ?", (name,)).fetchone()  # noqa: S608
    if found is None:
        raise NotFoundError(f"There is no batch {shown(name)}.")
    return _as_batch(found)


def _as_batch(row: Sequence[Any]) -> BatchRecord:
    values = dict(zip(BatchRecord.__dataclass_fields__, row, strict=True))
    faults = tuple(LineFault(**fault) for fault in json.loads(values["faults"]))
    parsed = {"metadata": json.loads(values["metadata"]), "times": json.loads(values["times"]), "faults": faults}
    return BatchRecord(**values | parsed)


def _owned(database: sqlite3.Connection, name: str, owner: str) -> BatchRecord:
    """The batch whose lease `owner` has; raises LeaseLostError. A lease that lapsed is good until somebody takes it."""
    found = database.execute("SELECT owner FROM leases WHERE batch_id = ?", (name,)).fetchone()
    if found is None or found[0] != owner:
        raise LeaseLostError(name)
    return _batch(database, name)


def _delete(database: sqlite3.Connection, name: str) -> None:
    found = database.execute("SELECT batch_id, is_good FROM files WHERE id = ?", (name,)).fetchone()
    if found is None:
        return
    if found[0] is not None:
        database.execute("DELETE FROM rows WHERE batch_id = ? AND is_good = ?", found)
    database.execute("DELETE FROM parts WHERE file_id = ?", (name,))
    database.execute("DELETE FROM files WHERE id = ?", (name,))
