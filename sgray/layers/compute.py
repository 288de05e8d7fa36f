"""How a model is computed on a device: by what product, and through what kind of residual."""

from __future__ import annotations

from dataclasses import dataclass

from sgray.layers.quant.unquantized import MakeProduct, matrix_product
from sgray.layers.residual import MakeResidual, TorchResidual


@dataclass(frozen=True, slots=True)
class Compute:
    """The default is plain torch, for any device."""

    product: MakeProduct = matrix_product
    residual: MakeResidual = TorchResidual
