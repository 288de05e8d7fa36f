"""How long a step takes: a formula in the place of a device.

The default constants are fitted to the results of Llama 3.1 8B in bf16 on an H200 that `benchmarks/results` holds; they
meet its prefill and decode workloads within some 7 percent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and tokens. A decode step is `step_s`, and more with every sequence and every token of context."""

    prefill_tokens_per_s: float = 40_600.0
    attention_context: float = 42_000.0  # tokens of context that double what computing a prompt token takes
    step_s: float = 0.0038
    sequence_s: float = 1.8e-5
    context_s: float = 2.2e-8

    def prefill_s(self, start: float, length: float) -> float:
        """To compute `length` prompt tokens behind `start` others."""
        return length / self.prefill_tokens_per_s * (1 + (start + length / 2) / self.attention_context)

    def decode_s(self, sequences: int, context: float) -> float:
        """A step that gives each of these sequences a token."""
        return self.step_s + sequences * self.sequence_s + context * self.context_s


@dataclass(frozen=True, slots=True)
class Size:
    """Of a replica, in tokens and sequences; the schedule's numbers are those of the CUDA defaults.

    `grain` tokens are simulated as one: a step with decoding sequences in it stands for `grain` steps.
    """

    memory_tokens: int = 800_000
    step_tokens: int = 8192
    mixed_tokens: int = 192
    max_running: int = 512
    grain: int = 16
