"""The same programs in SGLang's own language client and in ours, in turns, on one server of ours over HTTP.

    python benchmarks/language_pairs.py [MODEL] [--pairs 5] [--json FILE]

Each client is a process of its own that does one run when it is told to. SGLang's is imported from the interpreter that
the tests' fixture makes, or from `--sglang-python`. The cache is empty at the start of every run. Prints the median
seconds of each client, and the median of the ratios of the pairs, which other load on the machine disturbs least.

A model that is next to nothing (`benchmarks/models/tiny-vocab-49152 --load-format dummy --tokenizer-path
smollm2-135m-instruct`) leaves what the clients and the way to the engine cost; with a real one on a CPU the time is the
model's, and what can be saved is what need not be computed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORKLOADS = ("best_of_16", "select_64_choices", "select_64_questions", "fork_64_batch_16")
TOPIC_WORDS = """
sport politics science music cooking travel weather history art film finance health law school gardening physics
chemistry biology astronomy geology medicine fashion poetry theatre dance opera painting sculpture architecture
design photography gaming chess football tennis golf cricket rugby hockey boxing cycling running swimming rowing
sailing fishing hunting hiking climbing skiing farming trade industry transport energy mining steel paper books
news radio television internet security
"""


def main() -> int:
    """The server, both clients, the pairs."""
    arguments = _arguments()
    if arguments.client:
        return _client(arguments.client, arguments.url, arguments.tokens)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from sglang_clients import client_python

    import sgray as sgl
    from sgray.config import cache_dir

    pythons = {"sglang": arguments.sglang_python or str(client_python(cache_dir())), "sgray": sys.executable}
    given = {"load_format": arguments.load_format, "tokenizer_path": arguments.tokenizer_path}
    options = {name: value for name, value in given.items() if value is not None}
    with sgl.Runtime(arguments.model, dtype="float32", max_total_tokens=65_536, **options) as server:
        clients = {name: _Client(python, name, server.url, arguments.tokens) for name, python in pythons.items()}
        try:
            report = {}
            for name in arguments.only or WORKLOADS:
                report[name] = _pairs(clients, name, arguments.pairs)
                print(name, json.dumps(report[name]), flush=True)
        finally:
            for client in clients.values():
                client.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"tokens": arguments.tokens, "workloads": report}, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model directory or name (default: the small default model)")
    parser.add_argument("--load-format", help="dummy: random weights, so that a config.json alone is a model")
    parser.add_argument("--tokenizer-path", help="for a model directory that has no tokenizer")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each client (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS)
    parser.add_argument("--sglang-python", help="an interpreter that can import sglang")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--client", choices=("sgray", "sglang"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def _pairs(clients: dict[str, _Client], workload: str, count: int) -> dict[str, Any]:
    """One run of each to get warm, then the pairs; who is first changes."""
    for client in clients.values():
        client.run(workload)
    runs = {name: [] for name in clients}
    threads = dict.fromkeys(clients, 0)
    for number in range(count):
        for name in sorted(clients, reverse=bool(number % 2)):
            told = clients[name].run(workload)
            runs[name].append(told["seconds"])
            threads[name] = max(threads[name], told["threads"])
    ratios = [ours / theirs for ours, theirs in zip(runs["sgray"], runs["sglang"], strict=True)]
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in runs.items()}
    return {"median_s": medians, "ratio": round(statistics.median(ratios), 3), "threads_started": threads}


class _Client:
    """A process that runs programs of one client when it is told to."""

    def __init__(self, python: str, name: str, url: str, tokens: int) -> None:
        command = [python, __file__, "--client", name, "--url", url, "--tokens", str(tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, workload: str) -> dict[str, Any]:
        """One run: its seconds, and how many threads it had at most beyond those before it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(workload, file=self._process.stdin, flush=True)
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError(f"the client ended with status {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _client(name: str, url: str, tokens: int) -> int:
    """The loop of a client's process."""
    sgl, endpoint = _sglang(url) if name == "sglang" else _sgray(url)
    sgl.set_default_backend(endpoint)
    programs = _programs(sgl, tokens)
    for line in sys.stdin:
        endpoint.flush_cache()
        print(json.dumps(_timed(programs[line.strip()])), flush=True)
    return 0


def _sgray(url: str) -> tuple[Any, Any]:
    sys.path.insert(0, str(ROOT))
    import sgray as sgl

    return sgl, sgl.RuntimeEndpoint(url)


def _sglang(url: str) -> tuple[Any, Any]:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from sglang_clients import allow_torchvision

    allow_torchvision()
    import sglang as sgl

    return sgl, sgl.RuntimeEndpoint(url)


def _timed(program: Callable[[], Any]) -> dict[str, Any]:
    most, is_done, before = [0], threading.Event(), threading.active_count()

    def watch() -> None:
        while not is_done.wait(0.005):
            most[0] = max(most[0], threading.active_count() - before - 1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    program()
    seconds = time.perf_counter() - started
    is_done.set()
    watcher.join()
    return {"seconds": seconds, "threads": most[0]}


def _programs(sgl: Any, tokens: int) -> dict[str, Callable[[], Any]]:
    """The workloads, in words that both clients have."""
    sampling = {"max_tokens": tokens, "ignore_eos": True}

    @sgl.function
    def best_of(s: Any) -> None:
        s += "Question: why is the sky blue, and why is it red in the evening? Answer in a few plain words.\nAnswer:"
        forks = s.fork(16)
        for fork in forks:
            fork += sgl.gen("answer", temperature=1.0, **sampling)
        s["best"] = max((fork["answer"] for fork in forks), key=len)

    topics = TOPIC_WORDS.split()
    shots = "".join(f"Text: a note on {topic} and what it means to us.\nTopic: {topic}\n\n" for topic in topics[:24])

    @sgl.function
    def classify(s: Any, text: str, choices: list[str]) -> None:
        s += shots + f"Text: {text}\nTopic:" + sgl.select("topic", choices=choices)

    @sgl.function
    def wide(s: Any, item: int) -> None:
        s += f"Item {item}:"
        forks = s.fork(64)
        for number, fork in enumerate(forks):
            fork += f" {number}." + sgl.gen("a", max_tokens=1, ignore_eos=True)
        forks.join()

    choices = [f" {topic}" for topic in topics]
    questions = [{"text": f"a day of {topic}", "choices": choices[:4]} for topic in topics]
    return {
        "best_of_16": lambda: best_of.run()["best"],
        "select_64_choices": lambda: classify.run(text="what the judges said", choices=choices)["topic"],
        "select_64_questions": lambda: [state["topic"] for state in classify.run_batch(questions, num_threads=64)],
        "fork_64_batch_16": lambda: [state.text() for state in wide.run_batch([{"item": n} for n in range(16)])],
    }


if __name__ == "__main__":
    sys.exit(main())
