"""What each rank of a model holds, in bytes: known from the shapes, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgray.layers.linear import Placement
from sgray.layers.quant.unquantized import Unquantized
from sgray.models.decoder import Decoder
from sgray.models.spec import ModelSpec
from sgray.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part; `node` counts from 0, the replica's own."""

    rank: int
    node: int
    num_heads: int
    num_kv_heads: int
    weight_bytes: int
    kv_bytes_per_token: int


def share_of(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype) -> Share:
    """The part of the rank that `mesh` names, computing in `dtype`."""
    decoder = Decoder(spec, Placement(mesh, dtype, torch.device("meta")), Unquantized())
    num_kv_heads = spec.kv_rule.held(mesh)
    return Share(
        rank=mesh.tp_rank,
        node=mesh.tp_rank // mesh.ranks_per_node,
        num_heads=spec.query_rule.held(mesh),
        num_kv_heads=num_kv_heads,
        weight_bytes=sum(parameter.data.nbytes for _, parameter in decoder.parameters()),
        kv_bytes_per_token=2 * spec.num_layers * num_kv_heads * spec.head_dim * dtype.itemsize,
    )


def table(shares: list[Share]) -> str:
    """The parts as lines for a reader."""
    lines = ["rank  node  query heads  key-value heads  weights, MiB  key-value memory, KiB a token"]
    lines += [
        f"{one.rank:4}  {one.node:4}  {one.num_heads:11}  {one.num_kv_heads:15}  {one.weight_bytes / 2**20:12.1f}  "
        f"{one.kv_bytes_per_token / 2**10:28.1f}"
        for one in shares
    ]
    return "\n".join(lines)
