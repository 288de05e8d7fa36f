"""Ranks on GPUs give the tokens of one GPU, by graphs and without, and a killed one ends the others.

Needs a CUDA device; TRITON_INTERPRET=0 must be in the environment. Ranks that share a device, because there is only
one, do all sums by kernels in each other's memory; with more devices the large ones go over NCCL.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 1:  # over gloo the same is tried on any machine
    pytest.skip("no CUDA device", allow_module_level=True)

from grammars import run
from twins import GPU_SIZES, make_twin, some_tokens

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.engine.executor import load_executor
from sgray.errors import ConfigError
from sgray.protocol import Request, SamplingParams

VOCAB = 4001  # odd: the last rank has fewer
SIZES = GPU_SIZES | {"vocab_size": VOCAB, "attention_bias": True}


SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.fixture(autouse=True)
def shared_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks share a device where there is one."""
    if torch.cuda.device_count() == 1:
        monkeypatch.setenv(SHARING, "1")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(tmp_path_factory.mktemp("twin"), **SIZES)


def config_of(model_dir: Path, size: int, **schedule: Any) -> Config:
    return Config.parse(
        {
            "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cuda", "context_length": 2048},
            "memory": {"max_total_tokens": 32768},
            "schedule": {"max_running_requests": 32, "chunked_prefill_size": 1024, "random_seed": 0, **schedule},
            "parallel": {"tp_size": size},
        }
    )


def requests() -> list[Request]:
    prefix = some_tokens(150, vocab_size=VOCAB)
    prompts = [
        [*(prefix if index % 2 else []), *some_tokens(1 + index * 37 % 550, seed=index + 1, vocab_size=VOCAB)]
        for index in range(24)
    ]
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
    return [Request(str(index), prompt, (greedy, seeded)[index % 3 == 0]) for index, prompt in enumerate(prompts)]


def tokens_of(engine: Engine) -> list[dict[str, list[int]]]:
    """Twice, the second time from the cache."""
    with closing(engine):
        return [{name: answer.tokens for name, answer in run(engine, requests()).items()} for _ in range(2)]


@pytest.mark.parametrize("schedule", [{}, {"disable_cuda_graph": True}, {"disable_overlap": True}], ids=str)
def test_two_ranks_give_the_tokens_of_one(model_dir: Path, schedule: dict[str, Any]) -> None:
    assert tokens_of(Engine.load(config_of(model_dir, 2, **schedule))) == tokens_of(
        Engine.load(config_of(model_dir, 1, **schedule))
    )


# From four ranks on, two key-value heads are on more than one rank each; and each rank wants a device.
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
def test_four_gpus_share_two_key_value_heads(model_dir: Path) -> None:
    assert tokens_of(Engine.load(config_of(model_dir, 4))) == tokens_of(Engine.load(config_of(model_dir, 1)))


def test_a_killed_rank_is_a_fault_within_10_s(model_dir: Path) -> None:
    config = config_of(model_dir, 2)
    executor, info = load_executor(config)
    engine = Engine(executor, info, config)
    with closing(engine):
        run(engine, requests()[:2])
        os.kill(executor.processes[0], signal.SIGKILL)  # type: ignore[attr-defined]
        due = time.monotonic() + 10
        while engine.fault is None:
            assert time.monotonic() < due
            time.sleep(0.01)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARING, raising=False)
    make_twin(tmp_path, **{**SIZES, "num_attention_heads": 64, "num_key_value_heads": 64})
    with pytest.raises(ConfigError, match="needs a GPU for each rank"):
        Engine.load(config_of(tmp_path, 64))
