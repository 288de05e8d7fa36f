"""How a model is computed on a device: by what product, through what kind of residual, by what way through experts."""

from __future__ import annotations

from dataclasses import dataclass

from sgray.layers.experts import MakeExperts, TorchExperts
from sgray.layers.quant.unquantized import MakeProduct, matrix_product
from sgray.layers.residual import MakeResidual, TorchResidual


@dataclass(frozen=True, slots=True)
class Compute:
    """The default is plain torch, for any device."""

    product: MakeProduct = matrix_product
    residual: MakeResidual = TorchResidual
    experts: MakeExperts = TorchExperts
