"""The paged backend against attention written out, sequence by sequence and head by head, in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sgray.layers.attention import Span
from sgray.layers.backends.torch_sdpa import TorchBackend

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """(T, H, D) for T queries at positions from `start` on, over all keys so far, (S, K, D)."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        position = start + row
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            scores = keys[first : position + 1, kv_head] @ query[row, head] / math.sqrt(HEAD_DIM)
            out[row, head] = torch.softmax(scores, -1) @ values[first : position + 1, kv_head]
    return out


def build(parts: list[tuple[int, int]], page_size: int, num_layers: int) -> tuple[torch.Tensor, list[Span]]:
    """Random pages, and spans of (start, length) over shuffled page ids."""
    counts = [-(-(start + length) // page_size) for start, length in parts]
    ids = list(range(sum(counts) + 3))
    random.Random(1).shuffle(ids)
    spans, row = [], 0
    for (start, length), count in zip(parts, counts, strict=True):
        spans.append(Span(row, start, length, [ids.pop() for _ in range(count)]))
        row += length
    return torch.randn(sum(counts) + 3, num_layers, 2, page_size, KV_HEADS, HEAD_DIM), spans


def by_layer(pages: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(pages[:, layer, 0], pages[:, layer, 1]) for layer in range(pages.shape[1])]


@pytest.mark.parametrize("window", [None, 1, 10, 70])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1)],
        [(122, 1)],
        [(0, 123)],
        [(17, 100)],
        [(5, 1), (90, 1), (30, 1), (31, 1), (200, 1)],
        [(40, 1), (0, 65), (3, 1), (64, 17), (0, 1), (7, 2)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_pages(parts: list, page_size: int, window: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    windows = [None, window]
    pages, spans = build(parts, page_size, num_layers=2)
    pages = pages.to(dtype)
    query = torch.randn(sum(length for _, length in parts), HEADS, HEAD_DIM).to(dtype)
    step = TorchBackend(HEADS, KV_HEADS, HEAD_DIM, windows, dtype).plan(by_layer(pages), spans)
    for layer in range(2):
        ours = step.attend(layer, query)
        for span in spans:
            keys, values = pages[span.pages, layer].double().transpose(0, 1).flatten(1, 2)
            rows = slice(span.row, span.row + span.length)
            expected = reference(query[rows].double(), keys, values, span.start, windows[layer])
            # bfloat16 rounds scores and weights to 8 bits; values are of size 1.
            tolerance = 1e-5 if dtype == torch.float32 else 4e-2
            torch.testing.assert_close(ours[rows].double(), expected, atol=tolerance, rtol=0)


def test_what_a_neighbour_wrote_never_matters() -> None:
    pages, spans = build([(5, 1), (60, 1), (17, 9)], page_size=16, num_layers=1)
    query = torch.randn(11, HEADS, HEAD_DIM)
    backend = TorchBackend(HEADS, KV_HEADS, HEAD_DIM, [None], torch.float32)
    before = backend.plan(by_layer(pages), spans).attend(0, query)
    pages[spans[1].pages] = math.nan
    after = backend.plan(by_layer(pages), spans).attend(0, query)
    assert torch.equal(after[[0, *range(2, 11)]], before[[0, *range(2, 11)]])
    assert bool(after[1].isnan().all())
