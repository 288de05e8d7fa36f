"""Fills a decoder with random weights, so that a model's shapes can be timed without its checkpoint.

Everything is drawn on the device itself: nothing is read, nothing is copied. Knows parameters by name and number of
dimensions, and nothing of files.
"""

from __future__ import annotations

import zlib

import torch

from sgray.layers.parameter import Parameter
from sgray.models.decoder import Decoder

# Rows of a usual hidden size then give activations and scores of about one: finite, and no answer is sure.
STD = 0.02


def fill_dummy(decoder: Decoder, seed: int = 0) -> None:
    """Fills every parameter of `decoder` and finishes it. The same seed on the same kind of device: the same weights.

    Matrices and biases are normal around 0, the scales of norms around 1.
    """
    for name, parameter in decoder.parameters():
        _draw(name, parameter, seed)
    decoder.finish()


def _draw(name: str, parameter: Parameter, seed: int) -> None:
    """Each parameter has a stream of its own, so that its values do not depend on what else the model has."""
    data = parameter.data
    generator = torch.Generator(device=data.device)
    generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    is_scale = data.dim() == 1 and name.endswith("weight")
    data.normal_(1.0 if is_scale else 0.0, STD, generator=generator)
