"""The process that runs a batch is killed at random rows, and another goes on: every row is answered once."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sgray.serve.batches.records import BatchRecord
from sgray.serve.batches.store import Store

ROOT = Path(__file__).parents[3]
NUM_ROWS = 1000
NUM_KILLS = 4


@contextmanager
def process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """One that runs the batches of a directory; killed at the end, if it was not before."""
    command = [sys.executable, str(ROOT / "tests/support/batch_process.py"), str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        try:
            yield running
        finally:
            running.send_signal(signal.SIGKILL)


def read_lines(running: subprocess.Popen[str], count: int) -> None:
    assert running.stdout is not None
    for _ in range(count):
        assert running.stdout.readline(), "it ended by itself"


@contextmanager
def batch_of(directory: Path, count: int) -> Iterator[tuple[Store, str]]:
    """A store with a batch that nobody runs yet."""
    store = Store(directory, max_bytes=2**30)
    lines = [
        {
            "custom_id": f"row {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"prompt {number}"},
        }
        for number in range(count)
    ]
    file = store.add_file("in.jsonl", ["\n".join(map(json.dumps, lines)).encode()])
    yield store, store.add_batch(file.id, "/v1/completions", window="24h", window_s=86_400).id
    store.close()


def ended(store: Store, name: str) -> BatchRecord:
    deadline = time.monotonic() + 60
    while (batch := store.batch(name)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def check_output(store: Store, batch: BatchRecord, count: int) -> None:
    """Every row once, in the order of the input, with its own answer."""
    assert (batch.total, batch.completed, batch.failed, batch.error_file_id) == (count, count, 0, None)
    assert batch.output_file_id is not None
    lines = [json.loads(line) for line in b"".join(store.content(batch.output_file_id)).decode().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row {number}" for number in range(count)]
    texts = [line["response"]["body"]["choices"][0]["text"] for line in lines]
    assert texts == [f"prompt {number}"[::-1] for number in range(count)]
    assert len({line["id"] for line in lines}) == count


@pytest.mark.parametrize("seed", [0])
def test_a_batch_whose_process_is_killed_again_and_again_answers_each_row_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with batch_of(tmp_path, NUM_ROWS) as (store, name):
        seen = [0]
        for _ in range(NUM_KILLS):
            with process(tmp_path) as running:
                read_lines(running, rng.randrange(1, NUM_ROWS // (NUM_KILLS + 1)))
            batch = store.batch(name)
            assert seen[-1] <= batch.completed < NUM_ROWS
            seen.append(batch.completed)
        assert sorted(set(seen)) == seen, "every process came further"
        with process(tmp_path):
            check_output(store, ended(store, name), NUM_ROWS)


def test_of_two_processes_one_runs_the_batch_and_the_other_takes_it_over(tmp_path: Path) -> None:
    with batch_of(tmp_path, 300) as (store, name), process(tmp_path) as first:
        read_lines(first, 50)
        with process(tmp_path) as second:
            read_lines(first, 50)
            assert second.stdout is not None and not _is_readable(second.stdout.fileno())
            first.send_signal(signal.SIGKILL)
            check_output(store, ended(store, name), 300)
            assert second.stdout.readline().startswith("prompt ")


def _is_readable(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])
