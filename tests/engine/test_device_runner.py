"""The GPU's runner on Triton's interpreter: the same tokens as the CPU's runner, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with the extra `dev` on Linux")

import interpreter
import triton
from shared_units import record_shared
from thread_ranks import ThreadRanks
from twins import make_twin, some_tokens

from sgray.config import Config
from sgray.engine.device_load import load_device_runner
from sgray.engine.engine import Engine
from sgray.engine.executor import load_executor, measure_hardware
from sgray.engine.graphs import graph_sizes
from sgray.engine.plan import Executor
from sgray.layers.linear import Placement
from sgray.memory.pool import KVPool
from sgray.models.spec import ModelSpec, served_spec
from sgray.parallel.comm import Comm
from sgray.parallel.mesh import Mesh
from sgray.protocol import Grammar, Request, SamplingParams, TokenLogprobs

# Rows of padding hold garbage, which a GPU multiplies without a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
if triton.knobs.runtime.interpret:
    interpreter.install()
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 1}


def config_of(model_dir: Path, **schedule: object) -> Config:
    values = {
        "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cpu", "context_length": 64},
        "memory": {"max_total_tokens": 512, "page_size": 16},
        "schedule": {"max_running_requests": 2, "chunked_prefill_size": 20, "random_seed": 1, **schedule},
    }
    return Config.parse(values).resolve(measure_hardware())


def device_engine(model_dir: Path, **schedule: object) -> Engine:
    config = config_of(model_dir, disable_cuda_graph=DEVICE.type == "cpu", **schedule)
    spec = served_spec(model_dir, config)
    placement = Placement(Mesh(), torch.float32, DEVICE)
    runner, pool = load_device_runner(config, spec, model_dir, placement, lambda _: 2**30, lambda: None)
    info = load_executor(config)[1]
    assert info.num_pages == len(pool.pages)
    return Engine(runner, info, config)


def run(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], object]]:
    """Tokens and how it ended, by request."""
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    ends: dict[str, object] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            found[delta.id] += delta.tokens
            if delta.finish is not None:
                ends[delta.id] = delta.finish
    engine.check()
    return {name: (tokens, ends[name]) for name, tokens in found.items()}


def greedy(name: str, tokens: list[int], count: int = 5, **changes: object) -> Request:
    return Request(name, tokens, SamplingParams(max_new_tokens=count, temperature=0.0, **changes))


def mixed_requests() -> list[Request]:
    prefix = some_tokens(17)
    return [
        greedy("long", some_tokens(20, seed=2), 2),
        greedy("first", prefix + some_tokens(4, seed=3), 3, repetition_penalty=1.3, presence_penalty=0.4),
        greedy("second", prefix + some_tokens(2, seed=4), 2, logit_bias={50: 7.5}, min_new_tokens=2),
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe"])
def test_the_tokens_of_the_cpus_runner(tmp_path: Path, family: str) -> None:
    model_dir = make_twin(tmp_path, family, **SIZES)
    plain = Engine(*load_executor(config_of(model_dir)), config_of(model_dir))
    assert run(device_engine(model_dir), mixed_requests()) == run(plain, mixed_requests())


def test_two_ranks_give_the_scores_of_the_cpus_runner(tmp_path: Path) -> None:
    """Biases everywhere, a vocabulary that is odd, and one key-value head for both."""
    model_dir = make_twin(tmp_path, **SIZES, attention_bias=True, mlp_bias=True)
    asked = [greedy("asked", some_tokens(5), 2, logprobs=2, prompt_logprobs=1)]
    ranks = ThreadRanks(config_of(model_dir, disable_cuda_graph=True), model_dir, 2, build_device_runner)
    plain = Engine.load(config_of(model_dir))
    with closing(ranks):
        found = [scored(Engine(ranks, plain.info, config_of(model_dir)), asked), scored(plain, asked)]
    for mine, wanted in zip(*found, strict=True):
        assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]


def build_device_runner(
    config: Config, spec: ModelSpec, model_dir: Path, mesh: Mesh, comm: Comm, meet: Callable[[], None]
) -> tuple[Executor, KVPool]:
    placement = Placement(mesh, torch.float32, DEVICE, comm)
    return load_device_runner(config, spec, model_dir, placement, lambda _: 2**30, meet)


def test_log_probabilities_of_answer_and_prompt_are_the_cpus(tmp_path: Path) -> None:
    model_dir = make_twin(tmp_path, **SIZES)
    asked = greedy("asked", some_tokens(5), 2, logprobs=3, prompt_logprobs=2, logprob_ids=(9, 0, 4))
    both = [asked, greedy("fewer", some_tokens(5), 2, logprobs=0, logprob_ids=(1,))]
    found = [scored(device_engine(model_dir), both), scored(Engine.load(config_of(model_dir)), both)]
    assert {len(entry.of_ids) for entry in found[0]} == {3, 1}
    for mine, wanted in zip(*found, strict=True):
        assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]
        assert mine.of_ids == pytest.approx(wanted.of_ids, abs=1e-4)


def scored(engine: Engine, requests: list[Request]) -> list[TokenLogprobs]:
    """Every entry that requests bring, the prompts' first."""
    for request in requests:
        engine.add(request)
    found: list[TokenLogprobs] = []
    while engine.has_work:
        for delta in engine.step().deltas:
            found = [entry for entry in delta.prompt_logprobs or [] if entry is not None] + found
            found += delta.logprobs or []
    return found


def test_a_prefix_that_is_read_once_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences wait for the prefix that the first one computes; then all decode."""
    model_dir = make_twin(tmp_path, **SIZES)
    prefix = some_tokens(17)
    requests = [greedy(name, prefix + some_tokens(2, seed=seed), 3) for seed, name in enumerate("abc", start=2)]
    found = {}
    for min_saved in (1, 0):
        monkeypatch.setattr("sgray.engine.engine.MIN_SAVED", min_saved)
        engine = device_engine(model_dir, max_running_requests=3)
        shared = record_shared(engine)
        found[min_saved] = run(engine, requests)
        assert bool(shared) == bool(min_saved)
        assert not min_saved or {unit[1:3] for units in shared for unit in units} == {(0, 16)}
    assert found[1] == found[0]


def test_where_no_layer_sees_all_keys_nothing_is_read_once(tmp_path: Path) -> None:
    engine = device_engine(make_twin(tmp_path, "mistral", **SIZES, sliding_window=20))
    assert not engine._executor.reads_shared
    assert engine.limits.min_saved == 0
    shared = [size for size in graph_sizes(64, 512, 16, has_shared=False) if size.is_decode and size.is_shared]
    assert not shared


@pytest.mark.parametrize("max_sequences", [1, 2, 32, 600])
@pytest.mark.parametrize("max_short", [1, 4, 64])
def test_no_graph_provides_for_more_short_tokens_than_its_sequences_have(max_sequences: int, max_short: int) -> None:
    sizes = graph_sizes(max_sequences, 2048, max_short, has_shared=True)
    assert all(size.num_short == min(size.num_tokens, size.num_sequences * size.max_short) for size in sizes)
    assert {size.num_tokens for size in sizes if not size.is_decode} >= {64, 704}


def masked(name: str, tokens: list[int], allowed: list[list[int]], **changes: object) -> tuple[Request, Scripted]:
    request = greedy(name, tokens, len(allowed), **changes)
    return replace(request, grammar=Grammar("regex", name)), Scripted(allowed)


class Scripted:
    """A matcher that allows what a list says, step by step."""

    def __init__(self, allowed: list[list[int]]) -> None:
        self.allowed = iter([*allowed, []])

    def accept(self, token: int) -> None:
        pass

    def forced(self) -> list[int]:
        return []

    def mask(self, held: frozenset[int]) -> bytes | None:
        ids = next(self.allowed)
        return sum(1 << token for token in ids).to_bytes(16, "little") if ids else None


def run_masked(engine: Engine, pairs: list[tuple[Request, Scripted]], free: Request) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for request, matcher in pairs:
        engine._scheduler.add(request)
        engine._scheduler.resume(request.id, lambda after, stops, matcher=matcher: matcher)
    engine.add(free)
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.finish is None or delta.finish.error is None
            found.setdefault(delta.id, []).extend(delta.tokens)
    engine.check()
    return found


def test_masks_hold_as_on_the_cpu(tmp_path: Path) -> None:
    model_dir = make_twin(tmp_path, **SIZES)

    def pairs() -> list[tuple[Request, Scripted]]:
        everything = list(range(101))
        return [
            masked("a", some_tokens(5), [[3, 40, 77], everything]),
            masked("b", some_tokens(4, seed=2), [[100], [31, 32, 64]], repetition_penalty=1.3),
        ]

    free = greedy("free", some_tokens(4, seed=3), 2)
    config = config_of(model_dir, max_running_requests=3)
    wanted = run_masked(Engine(*load_executor(config), config), pairs(), free)
    assert wanted["a"][0] in (3, 40, 77) and wanted["b"][0] == 100
    assert run_masked(device_engine(model_dir, max_running_requests=3), pairs(), free) == wanted
