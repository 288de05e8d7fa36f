"""How rotary frequencies are stretched for contexts longer than the trained one, as plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScalingKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The rotary embedding of a model: base `theta`, the kind of stretching and that kind's numbers.

    Each field names the kinds that read it. `original_length` is the trained context, in tokens; `length` the served
    one. `dynamic` stretches only beyond the model's own limit, which is never served, so it is the plain embedding.
    `longrope` has two sets of factors; the served length alone picks one, so that a token's keys never depend on how
    long its sequence has become and cached keys stay right.
    """

    theta: float
    length: int
    kind: ScalingKind = "default"
    factor: float = 1.0  # linear, yarn, longrope, llama3
    original_length: int = 0  # yarn, longrope, llama3
    attention_factor: float | None = None  # yarn, longrope
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
