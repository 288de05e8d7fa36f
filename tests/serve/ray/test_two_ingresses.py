"""Two ingresses share a directory of batches: one of them works on a batch, and each row is computed once."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any

from sgray.config import DEFAULT_MODEL

NUM_ROWS = 24


def test_of_two_ingresses_one_runs_a_batch_and_both_tell_of_it(
    deploy: Callable[[Mapping[str, Any]], Any], batches_dir: str
) -> None:
    service = deploy({"num_ingress_replicas": 2})
    client = service.openai()
    body = {"model": DEFAULT_MODEL, "max_tokens": 4, "temperature": 0}
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"{number},"}}
        for number in range(NUM_ROWS)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="batch")
    before = sum(service.figures()["sgray:engine_requests"].values())
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    owners: set[str] = set()
    deadline = time.monotonic() + 120
    with sqlite3.connect(f"file:{batches_dir}/batches.sqlite3?mode=ro", uri=True) as database:
        while batch.status != "completed":
            assert time.monotonic() < deadline and batch.status in ("validating", "in_progress", "finalizing"), batch
            owners |= {owner for (owner,) in database.execute("SELECT owner FROM leases")}
            batch = client.batches.retrieve(batch.id)
    database.close()
    assert len(owners) == 1
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    service.assert_idle()
    assert sum(service.figures()["sgray:engine_requests"].values()) - before == NUM_ROWS
