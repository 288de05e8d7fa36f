"""Rotary position embedding: frequencies by kind of scaling, and the rotation of query and key heads.

The kinds follow their papers as transformers defines them (linear: kaiokendev; yarn: arXiv 2309.00071; longrope:
arXiv 2402.13753; llama3: Meta's Llama 3.1). Frequencies are float32, as in training.
Shape letters: T tokens, H heads, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgray.layers.scaling import RopeScaling


class Rope:
    """Turns positions into rotations once a step; every layer applies the same."""

    def __init__(self, head_dim: int, scaling: RopeScaling, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self._attention_factor = inverse_frequencies(head_dim, scaling)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of shape (T, 1, D) for `rotate`."""
        cos, sin = self._turns(positions)
        cos_TD, sin_TD = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos_TD[:, None].to(self._dtype), sin_TD[:, None].to(self._dtype)

    def table(self, length: int) -> Tensor:
        """Cosines, then sines, of the positions below `length`: float32, (length, D)."""
        return torch.cat(self._turns(torch.arange(length, device=self._frequencies.device)), dim=-1)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # The angle is a float32 as in training. Its cosine is taken in float64, because the float32 one differs in the
        # last bit with the place of a token in the batch.
        angles = (positions.float()[:, None] * self._frequencies).double()
        return (angles.cos() * self._attention_factor).float(), (angles.sin() * self._attention_factor).float()


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """A new tensor with each head's two halves rotated against each other; the sign sits in `sin_T1D`."""
    half = x_THD.shape[-1] // 2
    swapped = torch.cat((x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return (x_THD * cos_T1D).addcmul_(swapped, sin_T1D)


def inverse_frequencies(head_dim: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Frequencies of shape (D / 2,), and the factor by which cosine and sine are multiplied."""
    match scaling.kind:
        case "default" | "dynamic":
            return 1.0 / _wavelengths(head_dim, scaling.theta), 1.0
        case "linear":
            return 1.0 / _wavelengths(head_dim, scaling.theta) / scaling.factor, 1.0
        case "yarn":
            return _yarn(head_dim, scaling)
        case "longrope":
            return _longrope(head_dim, scaling)
        case "llama3":
            return _llama3(head_dim, scaling), 1.0


def _wavelengths(head_dim: int, theta: float) -> Tensor:
    """Radians to positions: theta to the power of 2i / D."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return torch.as_tensor(theta**exponents)


def _yarn(head_dim: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Fast dimensions stay, slow ones are interpolated, a ramp between them."""

    def dimension(num_rotations: float) -> float:
        """The dimension that turns `num_rotations` times within the trained length."""
        return (head_dim * math.log(scaling.original_length / (num_rotations * 2 * math.pi))) / (
            2 * math.log(scaling.theta)
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    wavelengths = _wavelengths(head_dim, scaling.theta)
    kept = 1 - ramp
    frequencies = 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope(head_dim: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """A searched factor for each dimension; one set for the trained length, one for longer contexts."""
    is_long = scaling.length > scaling.original_length
    factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor, dtype=torch.float32)
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        stretch = math.log(scaling.factor) / math.log(scaling.original_length) if scaling.factor > 1 else 0.0
        attention_factor = math.sqrt(1 + stretch)
    return 1.0 / (factors * _wavelengths(head_dim, scaling.theta)), attention_factor


def _llama3(head_dim: int, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones stay, the band between is blended."""
    frequencies = 1.0 / _wavelengths(head_dim, scaling.theta)
    waves = 2 * math.pi / frequencies
    longest = scaling.original_length / scaling.low_freq_factor
    shortest = scaling.original_length / scaling.high_freq_factor
    slowed = torch.where(waves > longest, frequencies / scaling.factor, frequencies)
    blend = (scaling.original_length / waves - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * slowed / scaling.factor + blend * slowed
    return torch.where((waves >= shortest) & (waves <= longest), blended, slowed)
