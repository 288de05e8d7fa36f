"""Files, batches and leases in the database, with the time in the test's hand."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgray.config import Config
from sgray.errors import ConfigError, NotFoundError, StorageError
from sgray.serve.batches.batches import batches_directory
from sgray.serve.batches.records import BatchRecord, Row
from sgray.serve.batches.store import DATABASE, LeaseLostError, Store

ROWS = [Row(1, "a", "{}"), Row(2, "b", "{}"), Row(4, "c", "{}")]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = Store(tmp_path, max_bytes=1000, now=clock)
    yield store
    store.close()


def begun(store: Store, owner: str = "me") -> BatchRecord:
    """A batch in progress under a lease of ten seconds."""
    file = store.add_file("f", [b"x"])
    name = store.add_batch(file.id, "/v1/completions", window="24h", window_s=100).id
    assert store.claim(owner, 10) is not None
    return store.begin(name, owner, ROWS)


def texts(store: Store, name: str | None) -> list[str]:
    assert name is not None
    return b"".join(store.content(name)).decode().splitlines()


def test_a_batch_is_claimed_by_one_until_its_lease_lapses(store: Store, clock: Clock) -> None:
    name = begun(store).id
    assert store.claim("other", 10) is None
    clock.now += 9
    store.renew(name, "me", 10)
    clock.now += 9
    assert store.claim("other", 10) is None
    clock.now += 1
    taken = store.claim("other", 10)
    assert taken is not None and taken.id == name and taken.status == "in_progress"


def test_whoever_lost_the_lease_can_change_nothing(store: Store, clock: Clock) -> None:
    name = begun(store).id
    clock.now += 10
    assert store.claim("other", 10) is not None
    before = store.batch(name)
    for act in (
        lambda: store.answer(name, "me", 1, "{}", is_good=True),
        lambda: store.renew(name, "me", 10),
        lambda: store.begin(name, "me", ROWS),
        lambda: store.fail(name, "me", []),
        lambda: store.finalize(name, "me"),
        lambda: store.finish(name, "me", lambda row: ""),
    ):
        with pytest.raises(LeaseLostError):
            act()
    store.release(name, "me")
    assert store.batch(name) == before and store.claim("me", 10) is None


def test_a_row_keeps_its_first_answer(store: Store) -> None:
    name = begun(store).id
    for answer in ("first", "second"):
        store.answer(name, "me", 2, answer, is_good=True)
    assert [row.number for row in store.unanswered(name, 0, 10)] == [1, 4]
    assert store.batch(name).completed == 1


def test_answers_come_out_in_the_order_of_the_rows(store: Store) -> None:
    name = begun(store).id
    for number, is_good in ((4, True), (2, False), (1, True)):
        store.answer(name, "me", number, f"answer {number}", is_good=is_good)
    assert store.finalize(name, "me").status == "finalizing"
    batch = store.finish(name, "me", lambda row: "")
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
    assert texts(store, batch.output_file_id) == ["answer 1", "answer 4"]
    assert texts(store, batch.error_file_id) == ["answer 2"]
    assert store.claim("other", 10) is None, "there is nothing left to do"


def test_rows_without_time_are_rows_of_the_error_file(store: Store) -> None:
    name = begun(store).id
    store.answer(name, "me", 1, "answer", is_good=True)
    store.finalize(name, "me")
    batch = store.finish(name, "me", lambda row: f"late {row.custom_id}")
    assert (batch.status, batch.completed, batch.failed) == ("expired", 1, 2)
    assert texts(store, batch.output_file_id) == ["answer"]
    assert texts(store, batch.error_file_id) == ["late b", "late c"]


def test_the_answers_go_with_the_output_file(store: Store) -> None:
    name = begun(store).id
    store.answer(name, "me", 1, "answer", is_good=True)
    store.cancel(name)
    batch = store.finish(name, "me", lambda row: "")
    assert batch.status == "cancelled" and batch.output_file_id is not None
    store.delete_file(batch.output_file_id)
    with pytest.raises(NotFoundError):
        store.content(batch.output_file_id)
    assert store._connection.execute("SELECT count(*) FROM rows").fetchone() == (0,)


def test_a_file_is_forgotten_when_its_time_is_over(store: Store, clock: Clock) -> None:
    file = store.add_file("f", [b"ab", b"c"], keep_s=50)
    assert b"".join(store.content(file.id)) == b"abc"
    clock.now += 50
    assert store.files() == ([], False)
    with pytest.raises(NotFoundError):
        store.file(file.id)
    store.purge()
    assert store._connection.execute("SELECT count(*) FROM parts").fetchone() == (0,)


def test_a_failed_act_leaves_nothing_behind(store: Store) -> None:
    def parts() -> Iterator[bytes]:
        yield b"x"
        raise OSError("the upload broke")

    with pytest.raises(OSError, match="broke"):
        store.add_file("f", parts())
    assert store.files() == ([], False)
    assert store._connection.execute("SELECT count(*) FROM parts").fetchone() == (0,)


def test_a_second_process_sees_what_the_first_wrote(store: Store, tmp_path: Path) -> None:
    batch = begun(store)
    other = Store(tmp_path, max_bytes=1000)
    assert other.batch(batch.id) == batch
    other.close()


def test_a_full_disk_is_a_clear_error_and_changes_nothing(store: Store) -> None:
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="full"):
        store.add_file("f", [b"x" * 900] * 1 + [b"y" * 90])
        for _ in range(100):
            store.add_batch(
                store.files()[0][0].id, "/v1/completions", window="24h", window_s=1, metadata={"a": "b" * 500}
            )
    assert not store._connection.in_transaction


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be read as one" * 20, None])
def test_a_place_that_cannot_hold_the_database_is_an_error_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        tmp_path = tmp_path / "file"
        tmp_path.write_text("")
    else:
        (tmp_path / DATABASE).write_bytes(content)
    with pytest.raises(ConfigError, match="batches_dir"):
        Store(tmp_path, max_bytes=1)


def test_a_database_of_a_later_release_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(ConfigError, match="version 9"):
        Store(tmp_path, max_bytes=1)


def test_a_directory_that_depends_on_where_a_process_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match="not absolute"):
        batches_directory(Config.parse({"batches": {"batches_dir": "here"}}))


def test_metadata_comes_back_as_it_was(store: Store) -> None:
    file = store.add_file("f", [b"x"])
    metadata = {"Ä": "\n", "b": json.dumps("c")}
    name = store.add_batch(file.id, "/v1/completions", window="24h", window_s=1, metadata=metadata).id
    assert store.batch(name).metadata == metadata
