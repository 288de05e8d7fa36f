"""Ranks that sum by kernels in each other's memory draw the tokens of one rank: two processes that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with the extra `dev` on Linux")

import peer_ranks
from grammars import run
from peer_ranks import PeerRanks
from twins import make_twin, some_tokens

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.parallel.symmetric import NUM_PROGRAMS, ROOM_BYTES
from sgray.protocol import Request, SamplingParams

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerRanks]:
    made = PeerRanks(2, tmp_path_factory.mktemp("ranks"), num_programs=NUM_PROGRAMS, room_bytes=ROOM_BYTES)
    with closing(made):
        yield made


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_two_ranks_that_sum_by_kernels_draw_the_tokens_of_one(ranks: PeerRanks, tmp_path: Path, family: str) -> None:
    """Summed products with biases, the embedding's rows and the head's scores, an odd vocabulary, and experts."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model_dir = make_twin(tmp_path, family, **SIZES, **biases)
    values = {
        "model": {"model_path": str(model_dir), "dtype": "float32", "device": "cpu", "context_length": 64},
        "memory": {"max_total_tokens": 512, "page_size": 16},
        "schedule": {
            "max_running_requests": 2,
            "chunked_prefill_size": 12,
            "random_seed": 1,
            "disable_cuda_graph": True,
        },
    }
    requests = [
        Request(str(length), some_tokens(length, seed=length), SamplingParams(max_new_tokens=2, temperature=0.0))
        for length in (5, 14)
    ]
    with closing(Engine.load(Config.parse(values))) as engine:
        wanted = {name: answer.tokens for name, answer in run(engine, requests).items()}
    found = ranks.run(peer_ranks.answered, 2, str(model_dir), values, [requests] * 2)
    assert found == [wanted, wanted]
