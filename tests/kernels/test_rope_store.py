"""Rotation into the pages: the kernel against plain torch, plain torch against complex numbers."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgray.kernels.rope_store import kernel, reference

PAGE = 16
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LLAMA, SMOLLM, ODD = (8, 2, 128), (9, 3, 64), (20, 5, 32)


@dataclass
class Step:
    qkv: Tensor
    query: Tensor
    pool: Tensor
    positions: Tensor
    locations: Tensor
    rotation: Tensor
    heads: int
    kv_heads: int
    norms: tuple[Tensor, Tensor] | None

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.pool[:, 1, 0], self.pool[:, 1, 1]

    def run(self, form) -> None:
        norms = dict(zip(("query_norm_D", "key_norm_D"), self.norms, strict=True)) if self.norms else {}
        form.rope_store(
            self.qkv,
            self.query,
            *self.sides,
            self.positions,
            self.locations,
            self.rotation,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            eps=1e-6,
            **norms,
        )

    def copy(self) -> "Step":
        return replace(self, query=self.query.clone(), pool=self.pool.clone())


def make_step(device, dtype=torch.float32, model=LLAMA, rows=7, has_norm=False) -> Step:
    heads, kv_heads, head_dim = model
    generator = torch.Generator().manual_seed(rows)
    wide = torch.full((rows, (heads + 2 * kv_heads) * head_dim + 32), torch.nan, dtype=dtype)
    qkv = wide[:, :-32]
    qkv.copy_(torch.randn(qkv.shape, generator=generator))
    angles = torch.rand(100, head_dim // 2, generator=generator) * 6
    num_pages = rows // 4 + 2
    return Step(
        qkv=wide.to(device)[:, :-32],
        query=torch.full((rows, heads, head_dim), torch.nan, dtype=dtype, device=device),
        pool=torch.full((num_pages, 2, 2, PAGE, kv_heads, head_dim), torch.nan, dtype=dtype, device=device),
        positions=torch.randint(100, (rows,), generator=generator, dtype=torch.int32).to(device),
        locations=torch.randperm(num_pages * PAGE, generator=generator)[:rows].int().to(device),
        rotation=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        heads=heads,
        kv_heads=kv_heads,
        norms=tuple((torch.rand(2, head_dim, generator=generator) + 0.5).to(device)) if has_norm else None,
    )


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """The same values written, and nothing else."""
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("model", [LLAMA, SMOLLM, ODD], ids=["llama", "smollm", "odd"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kernel_and_torch_write_the_same(device, dtype, model, has_norm) -> None:
    found = make_step(device, dtype, model, has_norm=has_norm)
    wanted = found.copy()
    found.run(kernel)
    wanted.run(reference)
    assert_same(found.query, wanted.query)
    assert_same(found.pool, wanted.pool)


@pytest.mark.parametrize("form", [reference, kernel], ids=["torch", "triton"])
def test_a_head_turns_as_complex_numbers_do(device, form) -> None:
    step = make_step(device)
    step.run(form)
    cos, sin = step.rotation.double()[step.positions.long()].chunk(2, dim=-1)
    heads = step.qkv.double().unflatten(-1, (12, 128))
    first, second = heads.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    turned = torch.cat((turned.real, turned.imag), dim=-1).float()
    assert_same(step.query, turned[:, :8])
    keys, values = (side.flatten(0, 1)[step.locations.long()] for side in step.sides)
    assert_same(keys, turned[:, 8:10])
    assert torch.equal(values, heads[:, 10:].float())


@pytest.mark.parametrize("form", [reference, kernel], ids=["torch", "triton"])
def test_norms_are_of_single_heads_and_leave_values_alone(device, form) -> None:
    step = make_step(device, has_norm=True)
    step.rotation = torch.cat((torch.ones(100, 64), torch.zeros(100, 64)), dim=1).to(device)
    step.run(form)
    heads = step.qkv.double().unflatten(-1, (12, 128))
    normal = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert step.norms is not None
    assert_same(step.query, (normal[:, :8] * step.norms[0]).float())
    keys, values = (side.flatten(0, 1)[step.locations.long()] for side in step.sides)
    assert_same(keys, (normal[:, 8:10] * step.norms[1]).float())
    assert torch.equal(values, heads[:, 10:].float())


@pytest.mark.parametrize("form", [reference, kernel], ids=["torch", "triton"])
def test_padding_rows_store_nothing_whatever_their_position(device, form) -> None:
    step = make_step(device, torch.bfloat16, has_norm=True)
    alone = step.copy()
    alone.run(form)
    step.positions[[2, 6]] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    written = step.locations.clone()
    step.locations[[2, 6]] = -1
    step.qkv[[2, 6]] = torch.nan
    step.run(form)
    kept = torch.tensor([0, 1, 3, 4, 5], device=device)
    assert torch.equal(step.query[kept], alone.query[kept])
    assert step.query[[2, 6]].isnan().all()
    for side, other in zip(step.sides, alone.sides, strict=True):
        side, other = side.flatten(0, 1), other.flatten(0, 1)
        assert torch.equal(side[written[kept].long()], other[written[kept].long()])
        assert side[written[[2, 6]].long()].isnan().all()


def test_other_layers_and_other_tokens_stay_as_they_were(device) -> None:
    step = make_step(device, torch.bfloat16, rows=33)
    step.run(kernel)
    assert step.pool[:, 0].isnan().all()
    is_written = ~step.pool[:, 1, 0].flatten(0, 1).isnan().all(dim=(1, 2))
    assert is_written.nonzero().flatten().tolist() == sorted(step.locations.tolist())


def test_no_rows_of_use_is_no_error(device) -> None:
    step = make_step(device, torch.bfloat16)
    step.locations.fill_(-1)
    step.run(kernel)
    assert step.pool.isnan().all() and step.query.isnan().all()
