"""Pages of keys and values as descriptors, by which the tensor memory accelerator loads whole boxes of them."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgray.kernels.launch import features

BOX = 64
"""Tokens that one load fetches."""

Boxes = tuple[TensorDescriptor, TensorDescriptor]
"""Of keys and of values: (page, token, K * D) in boxes of (1, BOX, D)."""


def boxes_of(keys: Tensor, values: Tensor) -> Boxes | None:
    """None where device or layout do not allow it: boxes need 16-byte alignment, and in smaller pages, and for exact
    products, single rows are loaded. Both are (page, token, K, D) and laid out alike."""
    return (_describe(keys), _describe(values)) if _has_boxes(keys) else None


def _has_boxes(pages: Tensor) -> bool:
    strides = pages.stride()[:-1]
    is_aligned = pages.data_ptr() % 16 == 0 and all(stride * pages.itemsize % 16 == 0 for stride in strides)
    return is_aligned and features(pages.device).has_tma and pages.itemsize == 2 and pages.shape[1] >= BOX


def _describe(pages: Tensor) -> TensorDescriptor:
    num_pages, page_size, num_kv_heads, head_dim = pages.shape
    shape = [num_pages, page_size, num_kv_heads * head_dim]
    return TensorDescriptor(pages, shape, [pages.stride(0), pages.stride(1), 1], [1, BOX, head_dim])
