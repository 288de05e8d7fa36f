"""How checkpoint names become the names of our parameters: tables of rules, no code per model. No torch.

A rule speaks of modules, without the last part of the name ("weight", "bias", later "scales"), `{layer}` stands for
every layer's number, and in a stack `{expert}` for every expert's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rename:
    """One checkpoint module is one of ours."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Fuse:
    """Several checkpoint modules are one of ours, their outputs one below the other in this order."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The modules of all experts are one of ours: the first expert's in this order, then the second's."""

    sources: tuple[str, ...]
    target: str

    def fused(self, num_experts: int) -> Fuse:
        """The same for so many experts."""
        numbers = map(str, range(num_experts))
        return Fuse(tuple(source.replace("{expert}", n) for n in numbers for source in self.sources), self.target)


@dataclass(frozen=True, slots=True)
class Drop:
    """A tensor (its full name) that some checkpoints carry and that is not needed."""

    source: str


Rule = Rename | Fuse | Stack | Drop


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: piece `piece` of the parameter `name`."""

    name: str
    piece: int = 0


class Mapping:
    """The rules spelled out for a number of layers, and of experts in each."""

    def __init__(self, rules: Sequence[Rule], num_layers: int, num_experts: int = 0) -> None:
        self._targets: dict[str, Target] = {}
        self._sources: dict[Target, str] = {}
        self._dropped: set[str] = set()
        for rule in _unrolled(rules, num_layers, num_experts):
            if isinstance(rule, Drop):
                self._dropped.add(rule.source)
                continue
            sources = rule.sources if isinstance(rule, Fuse) else (rule.source,)
            for piece, source in enumerate(sources):
                self._targets[source] = Target(rule.target, piece)
                self._sources[Target(rule.target, piece)] = source

    def is_dropped(self, tensor: str) -> bool:
        """Whether the checkpoint tensor is to be passed over."""
        return tensor in self._dropped

    def target(self, tensor: str) -> Target | None:
        """The parameter and piece of a checkpoint tensor, None where no rule speaks of it."""
        module, _, leaf = tensor.rpartition(".")
        target = self._targets.get(module)
        return target and Target(f"{target.name}.{leaf}", target.piece)

    def source(self, target: Target) -> str:
        """The checkpoint name of a piece of one of our parameters."""
        module, _, leaf = target.name.rpartition(".")
        return f"{self._sources[Target(module, target.piece)]}.{leaf}"


def _unrolled(rules: Iterable[Rule], num_layers: int, num_experts: int) -> Iterable[Rename | Fuse | Drop]:
    for rule in rules:
        plain = rule.fused(num_experts) if isinstance(rule, Stack) else rule
        for layer in range(num_layers):
            yield _for_layer(plain, str(layer))


def _for_layer(rule: Rename | Fuse | Drop, layer: str) -> Rename | Fuse | Drop:
    if isinstance(rule, Drop):
        return Drop(rule.source.replace("{layer}", layer))
    target = rule.target.replace("{layer}", layer)
    if isinstance(rule, Rename):
        return Rename(rule.source.replace("{layer}", layer), target)
    return Fuse(tuple(source.replace("{layer}", layer) for source in rule.sources), target)
