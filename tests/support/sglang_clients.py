"""SGLang's own clients, unchanged: where they are installed, and the script that drives them.

Run as a script, by the interpreter that `client_python` makes, it holds one session of each client with a server and
prints what it saw as one line of JSON. It knows nothing of what is right.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

WHEEL = "sglang==0.5.23"
# Only its Python files are used, so the one wheel that there is does for every interpreter.
WHEEL_TAGS = ["--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64"]
# What importing the two clients needs beside what our own tests need.
NEEDED = [
    "compressed-tensors==0.19.0",
    "datasets==5.2.0",
    "ipython",
    "loguru",
    "pillow",
    "pybase64",
    "pyzmq",
    "sentencepiece",
]
# It pins a torch that it was built with; of it only Python files are used, too.
NEEDED_ALONE = ["torchvision==0.28.0"]


class IndexUnreachableError(Exception):
    """The package index gives no answer."""


def client_python(cache: Path) -> Path:
    """An interpreter that can import SGLang's clients, made once in `cache`: our packages and theirs behind them."""
    from filelock import FileLock

    ours = sorted({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})
    key = sha256(repr([sys.version, ours, WHEEL, NEEDED, NEEDED_ALONE]).encode()).hexdigest()[:12]
    home = cache / "clients" / f"sglang-{key}"
    python, seal = home / "bin" / "python", home / "sealed"
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(home.with_suffix(".lock")):
        if not seal.exists():
            _checked([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
            _install(python, home, ours)
            seal.touch()
    return python


def _install(python: Path, home: Path, ours: list[str]) -> None:
    site = next(home.glob("lib/python*/site-packages"))
    site.joinpath("ours.pth").write_text("\n".join(ours) + "\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    _checked([*pip, "install", "-q", "--no-compile", *NEEDED])
    _checked([*pip, "install", "-q", "--no-compile", "--no-deps", *NEEDED_ALONE])
    _checked([*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", *WHEEL_TAGS, "-d", str(home), WHEEL])
    wheel = next(home.glob("sglang-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    wheel.unlink()


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        output = done.stdout + done.stderr
        if "connection broken by" in output:  # pip's words, for each time that it tries again
            raise IndexUnreachableError(output.splitlines()[0])
        raise AssertionError(f"{' '.join(command)}\n{output}")


def hold_session(python: Path, url: str, model_dir: Path, scratch: Path) -> dict[str, Any]:
    """Run this file against the server at `url`; what it saw."""
    command = [str(python), __file__, url, str(model_dir), str(scratch)]
    # Its own modules and ours must not meet: only the packages of both are shared.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment, cwd=scratch)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _allow_torchvision() -> None:
    """Declares two operators: the index's torchvision has none that a CPU build of torch could load, and asks for
    their names when it is imported. A build that has them is left alone."""
    from torch import library as operators

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            operators.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def _speak_language(url: str) -> dict[str, Any]:
    """A session of the frontend language over `RuntimeEndpoint`."""
    import sglang as sgl

    backend = sgl.RuntimeEndpoint(url)
    sgl.set_default_backend(backend)
    backend.flush_cache()
    backend.cache_prefix("The capital of France is")
    seen: dict[str, Any] = {"model": backend.get_model_name(), "info": sorted(backend.get_server_info())}

    @sgl.function
    def ask(s: Any, question: str) -> None:
        s += sgl.system("You answer in one word.") + sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0, stop=["\n"]))

    @sgl.function
    def pick(s: Any, method: Any) -> None:
        s += "The capital of France is" + sgl.select(
            "city", choices=[" London", " Paris", " Oslo"], choices_method=method
        )

    @sgl.function
    def fork(s: Any) -> None:
        s += "Names of fruits:"
        branches = s.fork(2)
        for index, branch in enumerate(branches):
            branch += f" {index}." + sgl.gen("name", max_tokens=3, temperature=0)
        branches.join()
        s += branches[0]["name"] + branches[1]["name"]
        s += sgl.gen(
            "end",
            max_tokens=4,
            temperature=0,
            return_logprob=True,
            top_logprobs_num=2,
            logprob_start_len=0,
            return_text_in_logprobs=True,
        )

    @sgl.function
    def err(s: Any) -> None:
        s += "x" + sgl.gen("answer", max_tokens=4, temperature=-3)

    france = "What is the capital of France?"
    state = ask.run(question=france)
    seen |= {"answer": state["answer"], "meta": state.get_meta_info("answer")}
    seen["streamed"] = "".join(ask.run(question=france, stream=True).text_iter("answer"))
    many = ask.run_batch([{"question": france}, {"question": "Is ice cold?"}] * 3, num_threads=4)
    seen["batch"] = [one["answer"] for one in many]
    methods = (sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized)
    seen["picked"] = [pick.run(method)["city"] for method in methods]
    state = fork.run()
    seen |= {"forked": state.text(), "end": state["end"], "logprobs": state.get_meta_info("end")}
    seen["error"] = str(err.run().error())
    return seen


def _measure(url: str, model_dir: str, scratch: str, backend: str, *more: str) -> dict[str, Any]:
    """A run of the load generator, by its command line; the line that it writes."""
    output = Path(scratch, f"{backend}.jsonl")
    sys.argv = [
        *(
            "bench_serving",
            "--backend",
            backend,
            "--base-url",
            url,
            "--tokenizer",
            model_dir,
            "--model",
            "smollm2-135m-instruct",
        ),
        *("--dataset-name", "random-ids", "--num-prompts", "6", "--random-input-len", "24", "--random-output-len", "6"),
        *("--random-range-ratio", "1", "--disable-tqdm", "--output-details", "--output-file", str(output), *more),
    ]
    runpy.run_module("sglang.bench_serving", run_name="__main__")
    return json.loads(output.read_text().splitlines()[-1])


def _main(url: str, model_dir: str, scratch: str) -> None:
    _allow_torchvision()
    seen = {"language": _speak_language(url)}
    logprobs = ("--return-logprob", "--top-logprobs-num", "2", "--token-ids-logprob", "5", "--logprob-start-len", "0")
    runs: dict[str, Callable[[], Any]] = {
        "sglang": lambda: _measure(url, model_dir, scratch, "sglang", "--flush-cache", "--cache-report", *logprobs),
        "sglang-oai-chat": lambda: _measure(url, model_dir, scratch, "sglang-oai-chat"),
        "vllm": lambda: _measure(url, model_dir, scratch, "vllm"),
    }
    print(json.dumps(seen | {name: run() for name, run in runs.items()}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
