"""The steps of a layer on a GPU: what stands between two matrix products is one kernel, or part of the product.

Few rows are bound by reading the weights: gate and sum are done by the kernel of the product, and one row begins to
read its weights while the kernel before it ends. (Its norm is a kernel of its own all the same: folded into the
product, it makes every program read the whole sum in float32.) Many rows are bound by arithmetic: the library's
product, and one kernel for sum and norm together. Where ranks have parts of the sum, that kernel gets those of few rows
out of their memories by itself.

Shape letters: T tokens, I hidden size, O outputs, F inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.kernels.activation.kernel import silu_mul
from sgray.kernels.all_reduce.kernel import add_rms_norm as add_rms_norm_of_ranks
from sgray.kernels.launch import features
from sgray.kernels.norm.kernel import add_rms_norm
from sgray.kernels.small_linear.kernel import SmallWeight
from sgray.kernels.small_linear.kernel import linear as small_linear
from sgray.layers.compute import Compute
from sgray.layers.fused_experts import KernelExperts
from sgray.layers.head import OutputHead
from sgray.layers.linear import Linear
from sgray.layers.norm import RMSNorm
from sgray.parallel.comm import Comm


class KernelProduct:
    """x W^T + b, by the kernel for few rows or by the library."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight = weight_OI
        self.bias = bias_O
        self.small = SmallWeight.of(weight_OI)
        # Weights whose halves are gate and up; for the others it is never asked.
        self.small_gated = SmallWeight.of(weight_OI, gated=True) if weight_OI.shape[0] % 2 == 0 else self.small
        self.has_pdl = features(weight_OI.device).has_pdl

    def is_small(self, num_rows: int) -> bool:
        """Whether the kernel for few rows is the better one."""
        return self.small.is_worth(num_rows)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not self.is_small(x_TI.shape[0]):
            return F.linear(x_TI, self.weight, self.bias)
        out = x_TI.new_empty(x_TI.shape[0], self.weight.shape[0])
        small_linear(x_TI, self.small, out, bias_O=self.bias, pdl=self.has_pdl)
        return out


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a product, (T, I), and the way to the others'."""

    x_TI: Tensor
    comm: Comm

    def whole(self) -> Tensor:
        """The product."""
        return self.comm.all_reduce(self.x_TI)


class KernelResidual:
    """The running sum with, sometimes, one product that is not added yet: the next norm does that on its way."""

    def __init__(self, sum_TI: Tensor, dtype: torch.dtype, pending: Tensor | Part | None = None) -> None:
        self._sum = sum_TI
        self._pending = pending
        self._dtype = dtype
        self._num_rows = sum_TI.shape[0]
        self._has_pdl = features(sum_TI.device).has_pdl

    @classmethod
    def of(cls, x_TI: Tensor) -> KernelResidual:
        """A sum that begins with the embeddings."""
        return cls(x_TI.to(torch.float32, copy=True), x_TI.dtype)

    def project(self, norm: RMSNorm, linear: Linear) -> Tensor:
        return _product(linear)(self._normed(norm))

    def gate(self, norm: RMSNorm, linear: Linear) -> Tensor:
        product = _product(linear)
        inner = product.weight.shape[0] // 2
        x_TI = self._normed(norm)
        out = x_TI.new_empty(self._num_rows, inner)
        if product.bias is None and product.is_small(self._num_rows):
            small_linear(x_TI, product.small_gated, out, pdl=self._has_pdl)
        else:
            silu_mul(product(x_TI), out, pdl=self._has_pdl)
        return out

    def add(self, linear: Linear, x: Tensor) -> None:
        product = _product(linear)
        if linear.is_summed:
            self.value()
            self._pending = Part(product(x), linear.comm)
        elif product.is_small(self._num_rows):
            small_linear(x, product.small, self.value(), bias_O=product.bias, into_residual=True, pdl=self._has_pdl)
        else:
            self.value()
            self._pending = F.linear(x, product.weight, product.bias)

    def feed(self, norm: RMSNorm, block: Callable[[Tensor], Tensor]) -> None:
        self._pending = block(self._normed(norm))

    def take(self, rows: Tensor | slice) -> KernelResidual:
        pending = self._pending
        if isinstance(pending, Part):
            pending = Part(_rows(pending.x_TI, rows), pending.comm)
        elif pending is not None:
            pending = _rows(pending, rows)
        return KernelResidual(_rows(self._sum, rows), self._dtype, pending)

    def value(self) -> Tensor:
        if self._pending is not None:
            self._sum.add_(self._pending.whole() if isinstance(self._pending, Part) else self._pending)
            self._pending = None
        return self._sum

    def scores(self, norm: RMSNorm, head: OutputHead, room_TV: Tensor | None = None) -> Tensor:
        product = _head_product(head)
        out = room_TV
        if out is None or not head.is_whole:
            out = self._sum.new_empty(self._num_rows, product.weight.shape[0])
        x_TI = self._normed(norm)
        if product.is_small(self._num_rows):
            small_linear(x_TI, product.small, out, pdl=self._has_pdl)
        elif x_TI.dtype == torch.float32:
            torch.mm(x_TI, product.weight.T, out=out)
        elif x_TI.is_cuda:
            torch.mm(x_TI, product.weight.T, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x_TI.float(), product.weight.T.float(), out=out)
        if head.is_whole:
            return out
        whole = head.gather(out)
        return whole if room_TV is None else room_TV.copy_(whole)

    def _normed(self, norm: RMSNorm) -> Tensor:
        out = self._sum.new_empty(self._sum.shape, dtype=self._dtype)
        pending, self._pending = self._pending, None
        if isinstance(pending, Part):
            peers = pending.comm.reach(pending.x_TI)
            if peers is not None:
                add_rms_norm_of_ranks(pending.x_TI, peers, self._sum, norm.weight, norm.eps, out, pdl=self._has_pdl)
                return out
            pending = pending.whole()
        add_rms_norm(self._sum, pending, norm.weight, norm.eps, out, pdl=self._has_pdl)
        return out


KERNELS = Compute(KernelProduct, KernelResidual.of, KernelExperts)
"""By the kernels of this project, on a GPU."""


def _product(linear: Linear) -> KernelProduct:
    product = linear.op
    assert isinstance(product, KernelProduct), product
    return product


def _head_product(head: OutputHead) -> KernelProduct:
    product = head.product
    assert isinstance(product, KernelProduct), product
    return product


def _rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
