"""Who a rank is among the ranks of one model, and the rules by which parameters are cut between them. No torch.

A rule sits on a parameter; neither the model files nor the quantisation methods know how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sgray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of this rank: number `tp_rank` of `tp_size` tensor parallel ranks, which fill node after node."""

    tp_rank: int = 0
    tp_size: int = 1
    num_nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        """How many ranks share this one's node, itself included."""
        return self.tp_size // self.num_nodes

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node."""
        return self.tp_rank % self.ranks_per_node


class ShardRule(Protocol):
    """How one dimension of a parameter is divided between the ranks."""

    @property
    def dim(self) -> int:
        """The dimension that is cut: 0 for outputs (rows of a weight), 1 for inputs (its columns)."""
        ...

    def problem(self, tp_size: int) -> str | None:
        """Why `tp_size` ranks cannot share this dimension, or None where they can."""
        ...

    def part(self, mesh: Mesh, length: int) -> tuple[int, int]:
        """The half-open range of a dimension of `length` that the rank holds."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds all of it."""

    dim: int = 0

    def problem(self, tp_size: int) -> str | None:
        return None

    def part(self, mesh: Mesh, length: int) -> tuple[int, int]:
        return 0, length


@dataclass(frozen=True, slots=True)
class Split:
    """Equal shares of indivisible units, such as heads; `what` names them in messages.

    With `shared`, more ranks than units are possible: neighbouring ranks then hold the same unit.
    """

    units: int
    what: str
    dim: int = 0
    shared: bool = False

    def of_inputs(self) -> Split:
        """The same cut for the layer that takes these units as its inputs."""
        return replace(self, dim=1)

    def problem(self, tp_size: int) -> str | None:
        if tp_size >= 1 and (self.units % tp_size == 0 or (self.shared and tp_size % self.units == 0)):
            return None
        return f"{self.units} {self.what} cannot be shared evenly by {tp_size} ranks"

    def held(self, mesh: Mesh) -> int:
        """How many units the rank holds."""
        start, stop = self.part(mesh, self.units)
        return stop - start

    def part(self, mesh: Mesh, length: int) -> tuple[int, int]:
        assert length % self.units == 0, (length, self)
        unit = length // self.units
        if mesh.tp_size > self.units:
            first = mesh.tp_rank * self.units // mesh.tp_size
            return first * unit, (first + 1) * unit
        each = self.units // mesh.tp_size * unit
        return mesh.tp_rank * each, (mesh.tp_rank + 1) * each


@dataclass(frozen=True, slots=True)
class Member:
    """All of it on the rank that holds number `index` of `units`, and nothing on the others."""

    units: Split
    index: int
    dim: int = 0

    def problem(self, tp_size: int) -> str | None:
        return self.units.problem(tp_size)

    def part(self, mesh: Mesh, length: int) -> tuple[int, int]:
        first, last = self.units.part(mesh, self.units.units)
        return (0, length) if first <= self.index < last else (0, 0)


@dataclass(frozen=True, slots=True)
class Spread:
    """Equal shares of a dimension of any length, but for the last ranks, which hold what is left."""

    dim: int = 0

    def problem(self, tp_size: int) -> str | None:
        return None

    def part(self, mesh: Mesh, length: int) -> tuple[int, int]:
        each = self.share(mesh, length)
        return min(mesh.tp_rank * each, length), min((mesh.tp_rank + 1) * each, length)

    def share(self, mesh: Mesh, length: int) -> int:
        """What every rank holds that is not among the last ones."""
        return -(-length // mesh.tp_size)


def check_rules(rules: list[ShardRule], tp_size: int) -> None:
    """Raises ConfigError with every reason why `tp_size` ranks do not fit, and the sizes that would."""
    problems = [problem for rule in rules if (problem := rule.problem(tp_size))]
    if not problems:
        return
    most = max((rule.units for rule in rules if isinstance(rule, Split)), default=1)
    fitting = [size for size in range(1, most + 1) if not any(rule.problem(size) for rule in rules)]
    raise ConfigError(
        f"parallel.tp_size {tp_size} does not fit this model: {'; '.join(problems)}. "
        f"Sizes that fit: {', '.join(map(str, fitting))}",
        param="tp_size",
    )
