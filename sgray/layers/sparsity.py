"""What the experts of a mixture are like, and how ranks may share them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sgray.parallel.mesh import Member, ShardRule, Split


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Each token goes through `num_active` of `num_experts` gated blocks of `inner_size` columns.

    `is_renormalized`: their weights sum up to one. `shared_size` is the inner size of one more block, which every token
    goes through. `layers[layer]` says which layers are such mixtures. With `has_whole_experts` each rank holds some of
    the experts, else its share of the columns of all.
    """

    num_experts: int
    num_active: int
    inner_size: int
    shared_size: int | None
    is_renormalized: bool
    layers: tuple[bool, ...]
    has_whole_experts: bool = False

    @property
    def experts(self) -> Split:
        """How whole experts are shared by ranks."""
        return Split(self.num_experts, "experts")

    @property
    def columns(self) -> Split:
        """How an expert's inner columns are shared by ranks that hold a part of each."""
        return Split(self.inner_size, "columns of an expert")

    @property
    def shared_columns(self) -> Split | None:
        """How the inner columns of the expert that all tokens go through are shared, if there is one."""
        return None if self.shared_size is None else Split(self.shared_size, "columns of the shared expert")

    @property
    def rules(self) -> list[ShardRule]:
        """All by which ranks share these blocks."""
        rules = [self.experts if self.has_whole_experts else self.columns]
        return [*rules, *([self.shared_columns] if self.shared_columns else [])]

    def rules_of(self, expert: int) -> tuple[ShardRule, ShardRule]:
        """How ranks share one expert: the rule of gate and up, whose outputs are its columns, and of what follows."""
        if self.has_whole_experts:
            return Member(self.experts, expert), Member(self.experts, expert)
        return self.columns, self.columns.of_inputs()
