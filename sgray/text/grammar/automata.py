"""Finite automata over characters: several conditions on one text, all of which must hold, as one small automaton.

A machine is one condition. `automaton` runs all of them side by side (the product construction), leaves out what leads
nowhere and joins states that mean the same (Moore's partition refinement).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgray.text.grammar import characters
from sgray.text.grammar.characters import Ranges
from sgray.text.grammar.expressions import Anchor, Char, Choice, Expression, Repeat, Text
from sgray.text.grammar.expressions import Sequence as Row
from sgray.text.grammar.faults import GrammarFault

MAX_PLACES = 4000
MAX_STATES = 2000
MAX_KEPT_STATES = 400
"""Each of them costs the engine a look at the whole vocabulary."""


class Machine(Protocol):
    """A condition on a text, read character by character. A state of None can never be good again."""

    @property
    def sets(self) -> Sequence[Ranges]:
        """The sets of characters that it tells apart."""
        ...

    @property
    def start(self) -> Hashable:
        """The state before the first character."""
        ...

    def step(self, state: Hashable, code: int) -> Hashable | None:
        """The state after one more character."""
        ...

    def accepts(self, state: Hashable) -> bool:
        """Whether the text may end here."""
        ...


@dataclass(frozen=True)
class Length:
    """So many characters."""

    least: int
    most: int | None
    sets: tuple[Ranges, ...] = ()
    start: int = 0

    def step(self, state: Hashable, code: int) -> Hashable | None:
        """See `Machine`."""
        assert isinstance(state, int)
        if self.most is None:
            return min(state + 1, self.least)
        return state + 1 if state < self.most else None

    def accepts(self, state: Hashable) -> bool:
        """See `Machine`."""
        assert isinstance(state, int)
        return state >= self.least


@dataclass(frozen=True)
class Multiple:
    """A decimal integer, with or without a sign, that `divisor` divides. Other characters count for nothing."""

    divisor: int
    start: int = 0

    @property
    def sets(self) -> tuple[Ranges, ...]:
        """See `Machine`."""
        return tuple(characters.of(digit) for digit in "0123456789")

    def step(self, state: Hashable, code: int) -> Hashable | None:
        """See `Machine`."""
        assert isinstance(state, int)
        return (state * 10 + code - 48) % self.divisor if 48 <= code <= 57 else state

    def accepts(self, state: Hashable) -> bool:
        """See `Machine`."""
        return state == 0


@dataclass(frozen=True)
class Without:
    """What another machine does not accept."""

    machine: Machine

    @property
    def sets(self) -> Sequence[Ranges]:
        """See `Machine`."""
        return self.machine.sets

    @property
    def start(self) -> Hashable:
        """See `Machine`."""
        return (self.machine.start,)

    def step(self, state: Hashable, code: int) -> Hashable | None:
        """See `Machine`."""
        assert isinstance(state, tuple)
        return (None if state[0] is None else self.machine.step(state[0], code),)

    def accepts(self, state: Hashable) -> bool:
        """See `Machine`."""
        assert isinstance(state, tuple)
        return state[0] is None or not self.machine.accepts(state[0])


@dataclass
class _Node:
    """A place in an expression: on to other places for nothing, at the text's begin, at its end, or for a character."""

    free: list[int] = field(default_factory=list)
    at_begin: list[int] = field(default_factory=list)
    at_end: list[int] = field(default_factory=list)
    reads: list[tuple[Ranges, int]] = field(default_factory=list)


class Pattern:
    """A text that an expression matches: the whole of it, or somewhere in it with `is_search`."""

    def __init__(self, expression: Expression, *, is_search: bool) -> None:
        self._nodes: list[_Node] = []
        self._steps: dict[tuple[frozenset[int], int], Hashable | None] = {}
        begin, self._end = self._node(), self._node()
        inner = self._node()
        after = self._add(expression, inner)
        self._nodes[begin].free.append(inner)
        self._nodes[after].free.append(self._end)
        if is_search:
            self._nodes[begin].reads.append((characters.ALL, begin))
            self._nodes[self._end].reads.append((characters.ALL, self._end))
        self.sets = list(dict.fromkeys(given for node in self._nodes for given, _ in node.reads))
        self.start: Hashable = (True, self._closed(frozenset([begin]), is_begin=True, is_end=False))

    def step(self, state: Hashable, code: int) -> Hashable | None:
        """See `Machine`."""
        key = (self._places(state), code)
        if key not in self._steps:
            found = frozenset(
                target
                for place in key[0]
                for given, target in self._nodes[place].reads
                if any(low <= code <= high for low, high in given)
            )
            self._steps[key] = (False, self._closed(found, is_begin=False, is_end=False)) if found else None
        return self._steps[key]

    def accepts(self, state: Hashable) -> bool:
        """See `Machine`."""
        assert isinstance(state, tuple)
        return self._end in self._closed(self._places(state), is_begin=state[0], is_end=True)

    def _places(self, state: Hashable) -> frozenset[int]:
        assert isinstance(state, tuple)
        places: frozenset[int] = state[1]
        return places

    def _closed(self, places: frozenset[int], *, is_begin: bool, is_end: bool) -> frozenset[int]:
        """All places that can be reached without a character."""
        found, todo = set(places), list(places)
        while todo:
            node = self._nodes[todo.pop()]
            nexts = node.free + (node.at_begin if is_begin else []) + (node.at_end if is_end else [])
            todo += (fresh := [target for target in nexts if target not in found])
            found.update(fresh)
        return frozenset(found)

    def _node(self) -> int:
        if len(self._nodes) >= MAX_PLACES:
            raise GrammarFault("", "this pattern is too complex")
        self._nodes.append(_Node())
        return len(self._nodes) - 1

    def _add(self, expression: Expression, begin: int) -> int:
        """Add the places of an expression that begins at `begin`; returns where it ends."""
        match expression:
            case Text(text):
                for sign in text:
                    begin = self._read(characters.of(sign), begin)
                return begin
            case Char(given):
                return self._read(given, begin)
            case Anchor(side):
                end = self._node()
                (self._nodes[begin].at_begin if side == "^" else self._nodes[begin].at_end).append(end)
                return end
            case Row(parts):
                for part in parts:
                    begin = self._add(part, begin)
                return begin
            case Choice(options):
                end = self._node()
                for option in options:
                    inner = self._node()
                    self._nodes[begin].free.append(inner)
                    self._nodes[self._add(option, inner)].free.append(end)
                return end
            case Repeat(part, least, most):
                return self._repeat(part, least, most, begin)
        raise ValueError(f"{expression} is no regular expression")

    def _read(self, given: Ranges, begin: int) -> int:
        end = self._node()
        self._nodes[begin].reads.append((given, end))
        return end

    def _repeat(self, part: Expression, least: int, most: int | None, begin: int) -> int:
        for _ in range(least):
            begin = self._add(part, begin)
        end = self._node()
        self._nodes[begin].free.append(end)
        if most is None:
            loop = self._node()
            self._nodes[begin].free.append(loop)
            after = self._add(part, loop)
            self._nodes[after].free += [loop, end]
            return end
        for _ in range(most - least):
            begin = self._add(part, begin)
            self._nodes[begin].free.append(end)
        return end


@dataclass(frozen=True)
class Automaton:
    """State 0 is the first. `edges[s]` maps the next state to the characters that lead there.

    Without states, no text is accepted. All states can be reached, and an end from all of them.
    """

    edges: list[dict[int, Ranges]]
    accepting: frozenset[int]

    def accepts(self, text: str) -> bool:
        """Whether the conditions hold for a text."""
        state: int | None = 0 if self.edges else None
        for sign in text:
            if state is None:
                return False
            state = next((to for to, given in self.edges[state].items() if characters.contains(given, sign)), None)
        return state in self.accepting


def automaton(machines: Sequence[Machine]) -> Automaton:
    """The texts that all machines accept. Raises GrammarFault where it becomes too large."""
    atoms = _atoms([given for machine in machines for given in machine.sets])
    starts = tuple(machine.start for machine in machines)
    numbers: dict[tuple[Hashable, ...], int] = {starts: 0}
    table: list[list[int]] = []
    accepting: set[int] = set()
    todo = [starts]
    for state in todo:  # grows while it is read
        if all(machine.accepts(part) for machine, part in zip(machines, state, strict=True)):
            accepting.add(numbers[state])
        row = []
        for atom in atoms:
            after = tuple(
                machine.step(part, atom[0][0]) if part is not None else None
                for machine, part in zip(machines, state, strict=True)
            )
            if None in after:
                row.append(-1)
                continue
            if after not in numbers:
                numbers[after] = len(numbers)
                todo.append(after)
            row.append(numbers[after])
        table.append(row)
        if len(numbers) > MAX_STATES:
            raise GrammarFault("", "this pattern, or these conditions together, are too complex")
    return _smallest(table, accepting, atoms)


def matches(expression: Expression, text: str, *, is_search: bool) -> bool:
    """Whether an expression matches a text."""
    machine = Pattern(expression, is_search=is_search)
    state: Hashable | None = machine.start
    for sign in text:
        state = None if state is None else machine.step(state, ord(sign))
    return state is not None and machine.accepts(state)


def _atoms(sets: Sequence[Ranges]) -> list[Ranges]:
    """The characters in groups that no set tells apart."""
    cuts = sorted({cut for given in sets for low, high in given for cut in (low, high + 1)} | {0, 0xD800, 0xE000})
    groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, after in zip(cuts, [*cuts[1:], characters.LAST + 1], strict=True):
        if low <= characters.LAST and not 0xD800 <= low < 0xE000:
            key = tuple(any(first <= low <= last for first, last in given) for given in sets)
            groups.setdefault(key, []).append((low, after - 1))
    return [characters.ranges(pairs) for pairs in groups.values()]


def _smallest(table: list[list[int]], accepting: set[int], atoms: list[Ranges]) -> Automaton:
    """The same without states that lead nowhere, and with those joined that mean the same."""
    alive = _alive(table, accepting)
    if 0 not in alive:
        return Automaton([], frozenset())
    block = {state: int(state in accepting) for state in alive}
    while True:
        signs = {s: (block[s], tuple(block.get(to, -1) for to in table[s])) for s in sorted(alive)}
        names: dict[tuple[int, tuple[int, ...]], int] = {}
        for state in sorted(alive):
            names.setdefault(signs[state], len(names))
        fresh = {state: names[signs[state]] for state in alive}
        if len(names) == len(set(block.values())):
            break
        block = fresh
    if len(names) > MAX_KEPT_STATES:
        raise GrammarFault("", "this pattern, or these conditions together, are too complex")
    edges: list[dict[int, Ranges]] = [{} for _ in names]
    for state in alive:
        found: dict[int, list[Ranges]] = {}
        for atom, to in zip(atoms, table[state], strict=True):
            if to in alive:
                found.setdefault(fresh[to], []).append(atom)
        edges[fresh[state]] = {to: characters.union(*sets) for to, sets in found.items()}
    return Automaton(edges, frozenset(fresh[state] for state in accepting & alive))


def _alive(table: list[list[int]], accepting: set[int]) -> set[int]:
    """The states from which an end can be reached."""
    before: dict[int, list[int]] = {}
    for state, row in enumerate(table):
        for to in row:
            before.setdefault(to, []).append(state)
    alive, todo = set(accepting), list(accepting)
    while todo:
        todo += (fresh := [s for s in set(before.get(todo.pop(), [])) if s not in alive])
        alive.update(fresh)
    return alive
