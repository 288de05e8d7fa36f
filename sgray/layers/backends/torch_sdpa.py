"""Attention over pages with torch's own scaled-dot-product kernel; serves CPUs, and any device torch runs on.

Decodes (one new token) are computed together: pages of sequences of similar length are gathered into one batch, and the
query heads that share a key-value head become the rows of one small product. Chunks of several tokens are computed
sequence by sequence. Everything that does not depend on the layer is prepared once a step.

Shape letters: B sequences, T tokens, S cached and new tokens, H query heads, K key-value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgray.layers.attention import Span

# A group of decodes is padded to its longest member: one member may be this much longer than the shortest, or this
# many pages where sequences are short.
MAX_PADDING = 1.25
FREE_PADDING_PAGES = 4


class TorchBackend:
    """`windows[layer]` is how many tokens, itself included, a token of that layer sees; None for all."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, windows: Sequence[int | None], dtype: torch.dtype
    ) -> None:
        self._heads = (num_kv_heads, num_heads // num_kv_heads, head_dim)
        self._windows = list(windows)
        self._dtype = dtype

    def plan(self, pages: Tensor, spans: list[Span]) -> TorchStep:
        """Work for one step; `pages` has shape (page, layer, 2, token, K, D)."""
        work = {window: self._work(pages, spans, window) for window in set(self._windows)}
        return TorchStep(pages, [work[window] for window in self._windows], self._heads)

    def _work(self, pages: Tensor, spans: list[Span], window: int | None) -> list[_Decodes | _Chunk]:
        page_size = pages.shape[3]
        seen = [_seen(span, page_size, window) for span in spans]
        groups = _groups([item for item in seen if item.span.length == 1])
        decodes = [_decodes(group, page_size, window, self._dtype, pages.device) for group in groups]
        chunks = [
            _chunk(item, window, self._dtype, pages.device) for item in seen if item.span.length > 1
        ]
        return [*decodes, *chunks]


class TorchStep:
    """The planned attention of one step."""

    def __init__(
        self, pages: Tensor, work: list[list[_Decodes | _Chunk]], heads: tuple[int, int, int]
    ) -> None:
        self._pages = pages
        self._work = work
        self._heads = heads

    def attend(self, layer: int, query_THD: Tensor) -> Tensor:
        query_TKGD = query_THD.unflatten(1, self._heads[:2])
        work = self._work[layer]
        if len(work) == 1:
            return self._mix(layer, work[0], query_TKGD).flatten(1, 2)
        out = torch.empty_like(query_TKGD, memory_format=torch.contiguous_format)
        for item in work:
            out[item.rows] = self._mix(layer, item, query_TKGD[item.rows])
        return out.flatten(1, 2)

    def _mix(self, layer: int, item: _Decodes | _Chunk, query_TKGD: Tensor) -> Tensor:
        keys = self._pages[:, layer, 0].index_select(0, item.pages)
        values = self._pages[:, layer, 1].index_select(0, item.pages)
        return item.mix(query_TKGD, keys, values)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one new token each. `pages` is flat, the same number for each; `mask` is (B, 1, 1, S) or None."""

    rows: slice | Tensor
    pages: Tensor
    num_sequences: int
    length: int
    mask: Tensor | None

    def mix(self, query_BKGD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys_BKSD, values_BKSD = self._tokens(keys), self._tokens(values)
        return F.scaled_dot_product_attention(query_BKGD, keys_BKSD, values_BKSD, attn_mask=self.mask)

    def _tokens(self, gathered: Tensor) -> Tensor:
        tokens = gathered.view(self.num_sequences, -1, *gathered.shape[2:])
        return tokens[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several new tokens of one sequence. `mask` is (T, S); None for a plain triangle without anything before it."""

    rows: slice
    pages: Tensor
    length: int
    mask: Tensor | None

    def mix(self, query_TKGD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = query_TKGD.shape[2]
        query_KGTD = query_TKGD.permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(
            query_KGTD,
            self._tokens(keys, group),
            self._tokens(values, group),
            attn_mask=self.mask,
            is_causal=self.mask is None,
        )
        return mixed.permute(2, 0, 1, 3)

    def _tokens(self, gathered: Tensor, group: int) -> Tensor:
        """Shape (K, G, S, D), the heads of a group sharing memory."""
        tokens = gathered.flatten(0, 1)[: self.length]
        return tokens.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A span with the pages that its tokens can see; the first of them begins at token `first`."""

    span: Span
    pages: list[int]
    first: int

    @property
    def length(self) -> int:
        """Tokens from `first` to the end of the span."""
        return self.span.start + self.span.length - self.first


def _seen(span: Span, page_size: int, window: int | None) -> _Seen:
    first_page = max(0, span.start + 1 - window) // page_size if window else 0
    num_pages = -(-(span.start + span.length) // page_size)
    return _Seen(span, span.pages[first_page:num_pages], first_page * page_size)


def _groups(decodes: list[_Seen]) -> list[list[_Seen]]:
    """Sequences of similar length together, each group in batch order."""
    groups: list[list[_Seen]] = []
    shortest = 0
    for item in sorted(decodes, key=lambda item: len(item.pages)):
        if groups and len(item.pages) <= max(shortest * MAX_PADDING, shortest + FREE_PADDING_PAGES):
            groups[-1].append(item)
        else:
            groups.append([item])
            shortest = len(item.pages)
    return [sorted(group, key=lambda item: item.span.row) for group in groups]


def _decodes(
    group: list[_Seen], page_size: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> _Decodes:
    most = max(len(item.pages) for item in group)
    # Padding repeats a sequence's own last page, so that nothing of a neighbour can reach it, masked or not.
    pages = [page for item in group for page in item.pages + item.pages[-1:] * (most - len(item.pages))]
    lengths = [item.length for item in group]
    hidden = [0 if window is None else max(0, item.length - window) for item in group]
    mask = None
    if any(hidden) or len(set(lengths)) > 1:
        position = torch.arange(max(lengths))
        is_seen = (position < torch.tensor(lengths)[:, None]) & (position >= torch.tensor(hidden)[:, None])
        mask = _additive(is_seen, dtype, device)[:, None, None]
    flat = torch.tensor(pages, device=device)
    return _Decodes(_rows([item.span.row for item in group], device), flat, len(group), max(lengths), mask)


def _chunk(item: _Seen, window: int | None, dtype: torch.dtype, device: torch.device) -> _Chunk:
    span = item.span
    mask = None
    if span.start > 0 or (window is not None and span.length > window):
        query = torch.arange(span.start, span.start + span.length)[:, None]
        key = torch.arange(item.first, span.start + span.length)
        is_seen = key <= query
        if window is not None:
            is_seen &= key > query - window
        mask = _additive(is_seen, dtype, device)
    pages = torch.tensor(item.pages, device=device)
    return _Chunk(slice(span.row, span.row + span.length), pages, item.length, mask)


def _additive(is_seen: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, float("-inf"))
    return mask.to(device)


def _rows(rows: list[int], device: torch.device) -> slice | Tensor:
    """Neighbouring rows as a slice, which needs no copy."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
