"""Weights as they are in the checkpoint, in the computing type.

On CPU the weights are packed once into oneDNN's blocked layout: 1.5 to 2 times as fast as a plain product for few rows
(measured on Zen 4, bfloat16 and float32), and never slower for many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.layers.linear import LinearOp, Placement
from sgray.layers.parameter import Parameter, Piece

# The layout depends on the number of rows expected. This one is close to the best from 1 row to 512; a layout made
# for one row is several times slower for many.
ROWS_HINT = 8


MakeProduct = Callable[[Tensor, Tensor | None], LinearOp]
"""Turns a weight (O, I) and its bias, if it has one, into x W^T + b."""


class Unquantized:
    """The linear method without quantisation."""

    def __init__(self, make_product: MakeProduct | None = None) -> None:
        self._make_product = make_product or matrix_product

    def parameters(
        self, weights: Sequence[Piece], biases: Sequence[Piece], placement: Placement
    ) -> dict[str, Parameter]:
        named = {"weight": weights} | ({"bias": biases} if biases else {})
        return {
            name: Parameter(pieces, placement.mesh, placement.dtype, placement.device) for name, pieces in named.items()
        }

    def build(self, parameters: dict[str, Parameter]) -> LinearOp:
        bias = parameters["bias"].data if "bias" in parameters else None
        return self._make_product(parameters["weight"].data, bias)


def matrix_product(weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearOp:
    """The fastest x W^T + b that this device has for the weight's type."""
    if _can_pack(weight_OI):
        return PackedProduct(weight_OI, bias_O)
    return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)


class PackedProduct:
    """x W^T + b with W in oneDNN's blocked layout."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS_HINT)
        self._bias = bias_O
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._pads_one_row = weight_OI.dtype == torch.float32

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._pads_one_row and x_TI.shape[0] == 1:
            # A single float32 row is summed in another order than the rows of a batch; as one of two it is not, so
            # that a sequence gives the same tokens alone and in company.
            return self._multiply(torch.cat((x_TI, x_TI)))[:1]
        return self._multiply(x_TI)

    def _multiply(self, x_TI: Tensor) -> Tensor:
        product: Tensor = self._product(x_TI, self._weight, self._bias, "none", [], "")
        return product


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
