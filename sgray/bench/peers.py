"""What SGLang and vLLM did on the same workloads: measured figures with their conditions, as data.

Knows no engine. The figures belong to one model shape on one kind of GPU; `is_comparable` says when they may stand
beside ours. Both are other people's work, run as they ship: https://github.com/sgl-project/sglang and
https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgray.protocol import EngineInfo

GPU = "NVIDIA H200"
CONDITIONS = (
    "one NVIDIA H200 (driver 580.159.04), torch 2.11.0+cu130, Llama-3.1-8B shapes in bfloat16, dummy weights, greedy, "
    "ignore_eos; both engines on one machine in one sitting"
)
ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "sglang": "0.5.16 (FlashAttention 3, overlapped scheduling, piecewise prefill graphs, radix cache)",
        "vllm": "0.23.0 (FlashAttention 3, full and piecewise graphs, prefix caching, max_num_seqs 512)",
    }
)
SHAPE: Mapping[str, int] = MappingProxyType(
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of each engine for one workload."""

    sglang: float
    vllm: float

    @property
    def best(self) -> float:
        """The better of the two."""
        return min(self.sglang, self.vllm)


def _http(tpot: float, first: float, gap: float, gap_p99: float, rate: float) -> Mapping[str, float]:
    return {"tpot_ms": tpot, "ttft_ms_p50": first, "itl_ms_p50": gap, "itl_ms_p99": gap_p99, "out_tok_s": rate}


# Offline interface, token ids in and out, one run each (the best of the workload's repeats).
OFFLINE_S: Mapping[str, Pair] = MappingProxyType(
    {
        "bs1_isl1024_osl1": Pair(0.028633, 0.034989),
        "bs1_isl1024_osl257": Pair(1.269031, 1.312790),
        "bs16_isl1024_osl257": Pair(1.799072, 1.825680),
        "bs64_isl1024_osl257": Pair(3.558629, 3.578015),
        "bs256_isl128_osl512": Pair(7.200514, 7.235899),
        "thr_1000_isl1024_osl256": Pair(44.937384, 42.090139),
        "prefill_48x8192_osl1": Pair(10.476821, 10.556860),
        "long_32x16384_osl129": Pair(18.527599, 18.764931),
        "shared_32x32_p4096_u128_osl128": Pair(27.346367, 27.890379),
        "shared_1x256_p8192_u128_osl257": Pair(14.861784, 15.173891),
    }
)
START_S: Mapping[str, float] = MappingProxyType({"sglang": 150.6, "vllm": 210.2})

# Streaming /v1/completions, token-id prompts, closed loop, eight client processes on the same 16 cores; the same shapes
# with a vocabulary of 49152 and a real tokenizer, so that text is made. 64 streams: 128 requests, 256 streams: 512.
HTTP: Mapping[str, Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "http_bs1_isl1024_osl257": {
            "sglang": _http(4.686, 30.4, 4.686, 5.17, 190.8),
            "vllm": _http(4.71, 38.3, 4.719, 5.256, 192.5),
        },
        "http_c64_isl1024_osl257": {
            "sglang": _http(10.18, 787.9, 7.563, 9.435, 4646.6),
            "vllm": _http(9.709, 1023.3, 7.554, 185.9, 4595.1),
        },
        "http_c256_isl128_osl512": {
            "sglang": _http(18.93, 358.1, 15.37, 24.82, 12835.9),
            "vllm": _http(18.12, 595.4, 18.04, 29.24, 13109.4),
        },
    }
)
READY_S: Mapping[str, float] = MappingProxyType({"sglang": 172.0, "vllm": 219.0})


def is_comparable(info: EngineInfo) -> bool:
    """Whether `info` is of the peers' model shape and type, on a CUDA device."""
    return info.device == "cuda" and info.dtype == "bfloat16" and _has_shape(Path(info.model_dir))


def _has_shape(model_dir: Path) -> bool:
    fields: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    default = fields["hidden_size"] // fields["num_attention_heads"]
    return {name: fields.get(name, default if name == "head_dim" else None) for name in SHAPE} == dict(SHAPE)
