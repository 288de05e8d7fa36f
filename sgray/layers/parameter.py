"""A tensor that a checkpoint has yet to fill, possibly from several checkpoint tensors, possibly only in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sgray.errors import ModelLoadError
from sgray.parallel.mesh import Mesh, ShardRule


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor: its whole shape, and the rule that says which part of it this rank holds."""

    shape: tuple[int, ...]
    rule: ShardRule


class Stored(Protocol):
    """A checkpoint tensor that is still in its file: indexing reads what is asked for and nothing else."""

    def get_shape(self) -> list[int]:
        """Its whole shape."""
        ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class Parameter:
    """The rank's parts of `pieces`, one below the other along dimension 0. Knows which pieces it still lacks."""

    def __init__(self, pieces: Sequence[Piece], mesh: Mesh, dtype: torch.dtype, device: torch.device) -> None:
        self._pieces = list(pieces)
        self._parts = [piece.rule.part(mesh, piece.shape[piece.rule.dim]) for piece in self._pieces]
        shapes = [
            (*piece.shape[: piece.rule.dim], stop - start, *piece.shape[piece.rule.dim + 1 :])
            for piece, (start, stop) in zip(self._pieces, self._parts, strict=True)
        ]
        self._offsets = [sum(shape[0] for shape in shapes[:index]) for index in range(len(shapes) + 1)]
        self.data = torch.empty((self._offsets[-1], *shapes[0][1:]), dtype=dtype, device=device)
        self._missing = set(range(len(shapes)))

    def fill(self, index: int, value: Tensor | Stored) -> None:
        """Copies this rank's part of piece `index`; raises ModelLoadError for a wrong shape or a second filling.

        Of a tensor in a file no more than that part is read.
        """
        piece, (start, stop) = self._pieces[index], self._parts[index]
        shape = tuple(value.shape if isinstance(value, Tensor) else value.get_shape())
        if shape != piece.shape:
            raise ModelLoadError(f"shape {list(shape)} instead of {list(piece.shape)}")
        if index not in self._missing:
            raise ModelLoadError("the tensor is there twice")
        if start < stop:
            held = (*(slice(None),) * piece.rule.dim, slice(start, stop))
            self.data[self._offsets[index] : self._offsets[index + 1]].copy_(value[held])
        self._missing.remove(index)

    def missing(self) -> list[int]:
        """Indices of the pieces that were never filled."""
        return sorted(self._missing)
