"""On a GPU the engine gives the same tokens however it is run: by graphs or not, overlapped or not, cached, in company.

In float32 to the token. In bfloat16 two scores may round to a tie: where tokens differ, the two best were that close.
Needs a CUDA device; TRITON_INTERPRET=0 must be in the environment.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from shared_units import record_shared
from tokenizers import Tokenizer
from twins import EXPERTS, GPU_SIZES, make_twin, some_tokens

from sgray.config import DEFAULT_MODEL, Config
from sgray.engine.engine import Engine
from sgray.errors import SgrayError
from sgray.models.hub import resolve_model
from sgray.protocol import Grammar, Request, SamplingParams

VOCAB = 4000
SIZES = GPU_SIZES | {"vocab_size": VOCAB}
NUM_OUTPUT = 24
DATE = Grammar("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")
TIE = 0.08  # nats between the two best; bfloat16 rounds scores of 16 to steps of 0.125
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "eager": {"schedule": {"disable_cuda_graph": True}},
    "serial": {"schedule": {"disable_overlap": True}},
    "uncached": {"memory": {"disable_radix_cache": True}},
    "small chunks": {"schedule": {"chunked_prefill_size": 96, "mixed_prefill_size": 32}},
}


@pytest.fixture(scope="module", params=["twin", "SmolLM2"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "twin":
        return str(make_twin(tmp_path_factory.mktemp("twin"), **SIZES))
    try:
        return str(resolve_model(DEFAULT_MODEL, progress=False))
    except SgrayError as error:
        pytest.skip(f"the default model is not here: {error.message}")


def engine_of(model_path: str, dtype: str, **sections: dict[str, Any]) -> Engine:
    schedule = {"max_running_requests": 64, "chunked_prefill_size": 2048, "random_seed": 0}
    values = {
        "model": {"model_path": model_path, "dtype": dtype, "device": "cuda", "context_length": 2048},
        "memory": {"max_total_tokens": 65536, **sections.get("memory", {})},
        "schedule": {**schedule, **sections.get("schedule", {})},
    }
    return Engine.load(Config.parse(values))


def requests(sampling: dict[str, Any]) -> list[Request]:
    """64 prompts of 1 to 700 tokens; half of them begin alike."""
    prefix = some_tokens(150, vocab_size=VOCAB)
    prompts = [
        [*(prefix if index % 2 else []), *some_tokens(1 + index * 37 % 550, seed=index + 1, vocab_size=VOCAB)]
        for index in range(64)
    ]
    params = SamplingParams(max_new_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2, **sampling)
    return [Request(str(index), prompt, params) for index, prompt in enumerate(prompts)]


Answer = list[tuple[int, float]]  # tokens, each with the distance of the two best


def run(engine: Engine, batch: list[Request]) -> dict[str, Answer]:
    found: dict[str, Answer] = {request.id: [] for request in batch}
    for request in batch:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.finish is None or delta.finish.reason in ("length", "stop"), delta
            for token, entry in zip(delta.tokens, delta.logprobs or [], strict=True):
                found[delta.id].append((token, entry.top[0][1] - entry.top[1][1]))
    engine.check()
    return found


def differing(one: dict[str, Answer], other: dict[str, Answer], tie: float) -> list[str]:
    """Where two runs part although the two best were further than `tie` from each other."""
    found = []
    for name, answer in one.items():
        for place, ((token, gap), (wanted, _)) in enumerate(zip(answer, other[name], strict=True)):
            if token != wanted:
                if gap >= tie:
                    found.append(f"request {name}, token {place}: {token} instead of {wanted}, {gap:.3f} nats apart")
                break
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_answers_do_not_depend_on_how_the_engine_runs(model_path: str, dtype: str) -> None:
    tie = 0.0 if dtype == "float32" else TIE
    engine = engine_of(model_path, dtype)
    batch = requests({"temperature": 0.0})
    wanted = run(engine, batch)
    parts = {"again, from the cache": differing(run(engine, batch), wanted, tie)}
    alone: dict[str, Answer] = {}
    for request in batch:
        alone |= run(engine, [request])
    parts["alone"] = differing(alone, wanted, tie)
    del engine
    for name, sections in WAYS.items():
        torch.cuda.empty_cache()
        parts[name] = differing(run(engine_of(model_path, dtype, **sections), batch), wanted, tie)
    assert {name: found for name, found in parts.items() if found} == {}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_by_graphs_give_the_tokens_of_single_kernels_in_company_as_alone(tmp_path: Path, family: str) -> None:
    """In float32: a rounded sum could choose another expert, and then no two scores are near each other."""
    model_dir = str(make_twin(tmp_path, family, **SIZES))
    engine, batch = engine_of(model_dir, "float32"), requests({"temperature": 0.0})[:24]
    wanted, alone = run(engine, batch), run(engine, batch[:1])
    assert differing(alone, wanted, 0.0) == []
    del engine
    torch.cuda.empty_cache()
    assert differing(run(engine_of(model_dir, "float32", **WAYS["eager"]), batch), wanted, 0.0) == []


def tree(seed: int) -> list[Request]:
    """A batch whose prompts grow out of each other like the branches of a tree."""
    draw = random.Random(seed)
    prompts: list[list[int]] = [some_tokens(draw.randint(1, 600), seed=seed, vocab_size=VOCAB)]
    for index in range(draw.randint(1, 23)):
        base = draw.choice(prompts)
        own = some_tokens(draw.randint(1, 200), seed=1000 * seed + index, vocab_size=VOCAB)
        prompts.append(base[: draw.randint(0, len(base))] + own)
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    return [Request(str(index), prompt[:1900], params) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("model_path", ["twin"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_500_random_trees_read_once_give_the_same_tokens(
    model_path: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tie = 0.0 if dtype == "float32" else TIE
    ways = {"each": (0, False), "once, by graphs": (64, False), "once, eager": (64, True)}
    answers: dict[str, list[dict[str, Answer]]] = {}
    for name, (min_saved, is_eager) in ways.items():
        monkeypatch.setattr("sgray.engine.engine.MIN_SAVED", min_saved)
        engine = engine_of(model_path, dtype, schedule={"disable_cuda_graph": is_eager})
        shared = record_shared(engine)
        answers[name] = [run(engine, tree(seed)) for seed in range(100 if is_eager else 500)]
        assert (sum(map(len, shared)) > 1000 * (1 - 0.9 * is_eager)) == bool(min_saved)
        del engine
        torch.cuda.empty_cache()
    wanted = answers.pop("each")
    for name, found in answers.items():
        wrong = [differing(one, other, tie) for one, other in zip(found, wanted, strict=False)]
        assert [entry for entry in wrong if entry] == [], name


def test_seeded_draws_with_penalties_do_not_depend_on_how_the_engine_runs(model_path: str) -> None:
    batch = requests({"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "repetition_penalty": 1.1})
    tokens = []
    for sections in ({}, *WAYS.values()):
        torch.cuda.empty_cache()
        found = run(engine_of(model_path, "float32", **sections), batch)
        tokens.append({name: [token for token, _ in answer] for name, answer in found.items()})
    assert all(one == tokens[0] for one in tokens)


@pytest.mark.parametrize("model_path", ["SmolLM2"], indirect=True)
def test_constrained_answers_among_free_ones_do_not_depend_on_how_the_engine_runs(model_path: str) -> None:
    free = requests({"temperature": 0.9, "top_p": 0.9, "seed": 7})
    batch = [
        replace(request, sampling=replace(request.sampling, ignore_eos=False), grammar=DATE if index % 4 == 1 else None)
        for index, request in enumerate(free)
    ]
    tokens = []
    for sections in ({}, *WAYS.values()):
        torch.cuda.empty_cache()
        found = run(engine_of(model_path, "float32", **sections), batch)
        tokens.append({name: [token for token, _ in answer] for name, answer in found.items()})
    assert all(one == tokens[0] for one in tokens)
    tokenizer = Tokenizer.from_file(f"{model_path}/tokenizer.json")
    texts = [tokenizer.decode(tokens[0][request.id]) for request in batch if request.grammar is not None]
    assert [text for text in texts if not re.fullmatch(DATE.source, text)] == []


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device(model_path: str) -> None:
    engine = engine_of(model_path, "bfloat16")
    run(engine, requests({"temperature": 0.0}))
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.zeros(1, device="cuda").item()
        run(engine, requests({"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {5: 1.0}}))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_too_little_memory_says_what_to_lower(model_path: str) -> None:
    with pytest.raises(SgrayError, match="mem_fraction_static"):
        engine_of(model_path, "bfloat16", memory={"max_total_tokens": 2**40})
