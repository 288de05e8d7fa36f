"""Kills a whole server, its Ray cluster included, while it works on a batch, and starts another one on the directory.

    python benchmarks/kill_cluster.py [--rows 300] [--kills 3] [--seed 0]

`kill -9` of every process at once, after a random number of rows; then the next server goes on. Fails unless every row
is answered exactly once, in the order of the input, and with the text that a server that is left alone gives it. Too
slow for the tests, which kill the process that works on a batch, but not a cluster.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import openai  # noqa: E402 - after the path
import psutil  # noqa: E402

import sgray as sgl  # noqa: E402
from sgray.config import DEFAULT_MODEL  # noqa: E402

POLL_S = 0.05


def main() -> int:
    """The batch, the kills, the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="sgray-batches-") as directory:
        name = ""
        for number in range(arguments.kills + 1):
            runtime = _server(directory)
            try:
                client = openai.OpenAI(base_url=f"{runtime.url}/v1", api_key="none", timeout=120)
                name = name or _submitted(client, arguments.rows)
                if number == arguments.kills:
                    _check(client, name, arguments.rows)
                    break
                before = client.batches.retrieve(name).request_counts.completed
                wanted = before + rng.randint(1, max(1, (arguments.rows - before) // (arguments.kills - number + 1)))
                done = _killed(client, name, wanted, runtime)
                print(f"server {number}: came to {before} answered rows, was killed after {done}", flush=True)
            finally:
                runtime.shutdown()
    return 0


def _server(directory: str) -> sgl.Runtime:
    return sgl.Runtime(batches_dir=directory, dtype="float32", max_total_tokens=16_384)


def _submitted(client: openai.OpenAI, count: int) -> str:
    body = {"model": DEFAULT_MODEL, "max_tokens": 4, "temperature": 0}
    rows = [
        {"custom_id": f"row {row}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"{row} +"}}
        for row in range(count)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def _killed(client: openai.OpenAI, name: str, wanted: int, runtime: sgl.Runtime) -> int:
    """Kill everything once so many rows are answered; how many that were when they were last counted."""
    while (done := client.batches.retrieve(name).request_counts.completed) < wanted:
        time.sleep(POLL_S)
    server = psutil.Process(runtime._server.pid)
    doomed = [server, *server.children(recursive=True)]
    for process in doomed:
        process.kill()
    psutil.wait_procs(doomed, timeout=30)
    return done


def _check(client: openai.OpenAI, name: str, count: int) -> None:
    while (batch := client.batches.retrieve(name)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch.status
        time.sleep(POLL_S)
    assert batch.output_file_id is not None and batch.error_file_id is None
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row {row}" for row in range(count)]
    for row in range(0, count, max(1, count // 10)):
        again: Any = client.completions.create(model=DEFAULT_MODEL, prompt=f"{row} +", max_tokens=4, temperature=0)
        assert lines[row]["response"]["body"]["choices"][0]["text"] == again.choices[0].text, row
    print(f"{count} rows, each answered once")


if __name__ == "__main__":
    sys.exit(main())
