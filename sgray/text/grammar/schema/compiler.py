"""A JSON schema as a grammar that accepts nothing but JSON texts of values that meet it.

Where a text that would meet the schema is not accepted, that is on purpose:
- members stand in the order of the schema: declared ones, then required ones that are not declared, then others;
- an object schema that declares members and does not speak of `additionalProperties` gets no others, and an array
  schema with `prefixItems` and without `items` no more items;
- a schema without `type` gets values of the types that its keywords speak of;
- numbers have at most 20 digits before and behind the point; within bounds 15 in all, and no exponent; multiples 10;
- integers are written without a fraction; strings as `Strings` says; fixed values in their shortest spelling;
- other members never have names that begin like many declared ones.
The order of the modules: `document` reads, `branches` resolves combinations, this one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from sgray.text.grammar import characters, regex
from sgray.text.grammar.automata import Length, Machine, Pattern, Without, automaton, matches
from sgray.text.grammar.expressions import (
    EMPTY,
    NEVER,
    Anchor,
    Char,
    Choice,
    Expression,
    Repeat,
    Rule,
    Text,
    choice,
    sequence,
)
from sgray.text.grammar.expressions import Sequence as Row
from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.json_grammar import Json
from sgray.text.grammar.rules import Rules
from sgray.text.grammar.schema import numbers
from sgray.text.grammar.schema.branches import TYPES, Branch, Branches, Places
from sgray.text.grammar.schema.document import Document, below
from sgray.text.grammar.schema.formats import REFUSED, format_tree
from sgray.text.grammar.schema.values import key, types_of

MAX_UNIQUE = 6
MAX_DIVISOR = 200
MAX_PATTERNS = 4
_MAX_NAME_STEPS = 24


WriteMember = Callable[["SchemaWriter", str, Places], Expression]
"""Writes a member of a name, whose value meets the schemas at the places."""


def compile_schema(schema: Any) -> str:
    """The grammar of a schema in GBNF. Raises GrammarFault with the JSON Pointer of what cannot be honoured."""
    rules = Rules()
    grammar = rules.grammar(schema_expression(schema, Json(rules)))
    if grammar is None:
        raise GrammarFault("#", "the schema cannot be satisfied: no value meets it")
    return grammar


def schema_expression(schema: Any, json: Json) -> Expression:
    """The values that meet a schema, written into the rules of `json`."""
    return _guarded(lambda: SchemaWriter(schema, json).value(("#",)))


def object_expression(schema: Any, json: Json) -> Expression:
    """The objects that meet a schema."""
    return _guarded(lambda: SchemaWriter(schema, json).value_of(("#",), frozenset(("object",))))


def members_expression(schema: Any, json: Json, write: WriteMember, comma: Expression) -> Expression:
    """The members of the objects that meet a schema, each as `write` has it, `comma` between them.

    Members that are not declared do not occur.
    """
    return _guarded(lambda: SchemaWriter(schema, json).members(write, comma))


def _guarded(write: Callable[[], Expression]) -> Expression:
    try:
        return write()
    except RecursionError:
        raise GrammarFault("#", "its parts lie in each other too deeply, or references lead to themselves") from None


@dataclass(frozen=True)
class Members:
    """What an object or an array has: `listed` ones, each with whether it must be there, then any number of `other`."""

    listed: tuple[tuple[Expression, bool], ...]
    other: Expression
    least: int
    most: int | None
    comma: Expression
    repeats: bool
    """Those of an object: any may be missing, and of the others, which may be one again and again, one alone counts."""


class SchemaWriter:
    """Writes the values of one schema."""

    def __init__(self, schema: Any, json: Json) -> None:
        self.branches = Branches(Document(schema))
        self.json = json
        self._known: dict[Places, Rule] = {}

    def value(self, places: Places | None) -> Expression:
        """The values that meet the schemas at all places."""
        telling = None if places is None else self.branches.telling(places)
        if telling is None:
            return NEVER
        if not telling:
            return self.json.anything()
        if telling not in self._known:
            if len(self._known) > 5000:
                raise GrammarFault(telling[0], "the schema has too many parts that are different")
            self._known[telling] = rule = self.json.rules.reserve("value")
            self.json.rules.define(rule, choice(self._branch(one) for one in self.branches.of(telling)))
        return self._known[telling]

    def value_of(self, places: Places, allowed: frozenset[str]) -> Expression:
        """The values of the allowed types that meet the schemas at all places."""
        return choice(self._branch(one, allowed) for one in self.branches.of(places))

    def members(self, write: WriteMember, comma: Expression) -> Expression:
        """See `members_expression`."""
        options: list[Expression] = []
        for branch in self.branches.of(("#",)):
            if "object" not in self.branches.types(branch):
                continue
            least, most = self._range(branch, "minProperties", "maxProperties")
            listed = self._listed(branch, lambda name, places: write(self, name, places))
            if listed is not None and (most is None or least <= most):
                empty, some = self._first(Members(listed, NEVER, least, most, comma, repeats=True))
                options += [some] if some != NEVER else []
                options += [EMPTY] if empty else []
        return choice(options)

    def texts(self, places: Places, mark: str) -> Expression:
        """The strings that meet the schemas at all places, as they are and without a mark in them."""
        options: list[Expression] = []
        for branch in self.branches.of(places):
            values = self.branches.values(branch)
            if values is not None:
                options += [Text(value) for value in values if isinstance(value, str) and mark not in value]
            elif "string" in self.branches.types(branch):
                place = branch.places[0] if branch.places else "#"
                options.append(self._located(place, partial(self._text, branch, mark)))
        return choice(options)

    def _text(self, branch: Branch, mark: str) -> Expression:
        least, most = self._range(branch, "minLength", "maxLength")
        trees = self._patterns(branch)
        if not trees and (least, most) != (0, None):
            return Repeat(Char(characters.complement(characters.of(mark[0]))), least, most)
        machines: list[Machine] = [Pattern(tree, is_search=is_search) for tree, is_search in trees]
        machines += [Length(least, most)] if (least, most) != (0, None) else []
        without = Without(Pattern(Text(mark), is_search=True))
        return regex.automaton_expression(automaton([*machines, without]), self.json.rules)

    def _branch(self, branch: Branch, allowed: frozenset[str] = TYPES) -> Expression:
        place = branch.places[0] if branch.places else "#"
        types = self.branches.types(branch) & allowed
        values = self.branches.values(branch)
        if values is not None:
            kept = [value for value in values if types_of(value) & allowed]
            return self._located(place, lambda: self.json.one_of(kept))
        if branch.unless:
            raise GrammarFault(place, "this branch of oneOf cannot be told apart from the others")
        options: list[Expression] = [self.json.fixed(None)] if "null" in types else []
        options += [self.json.fixed(True), self.json.fixed(False)] if "boolean" in types else []
        if "integer" in types:
            options.append(self._located(place, lambda: self._number(branch, is_whole="number" not in types)))
        if "string" in types:
            options.append(self._located(place, lambda: self._string(branch)))
        options += [self._object(branch)] if "object" in types else []
        options += [self._array(branch)] if "array" in types else []
        return choice(options)

    def _located(self, place: str, write: Any) -> Expression:
        """What `write` gives; a fault without a place is one at `place`."""
        try:
            written: Expression = write()
        except GrammarFault as fault:
            raise GrammarFault(fault.place if fault.place.startswith("#") else place, str(fault)) from None
        return written

    def _schemas(self, branch: Branch, keyword: str) -> list[tuple[str, Any]]:
        """The places of a keyword in a branch, and what stands there."""
        return [
            (below(place, keyword), schema[keyword])
            for place in branch.places
            if keyword in (schema := self.branches.schema(place))
        ]

    def _range(self, branch: Branch, least: str, most: str) -> tuple[int, int | None]:
        """The strictest counts of two keywords."""
        low = max((int(value) for _, value in self._schemas(branch, least)), default=0)
        high = min((int(value) for _, value in self._schemas(branch, most)), default=None)
        return low, high

    def _number(self, branch: Branch, *, is_whole: bool) -> Expression:
        bounds = self.branches.bounds(branch)
        divisors = [value for _, value in self._schemas(branch, "multipleOf")]
        if divisors:
            return self._multiple(branch, bounds, divisors)
        if bounds.is_free:
            return self.json.integer() if is_whole else self.json.number()
        if is_whole:
            return self.json.rules.add(numbers.integers(*bounds.integers()), "integer")
        return regex.automaton_expression(numbers.numbers(bounds), self.json.rules)

    def _multiple(self, branch: Branch, bounds: numbers.Bounds, divisors: list[float]) -> Expression:
        """Multiples of whole numbers, which are whole themselves."""
        divisor = 1
        for at, value in self._schemas(branch, "multipleOf"):
            if value != int(value):
                raise GrammarFault(at, "multipleOf is supported for whole numbers alone")
            divisor = numbers.common_multiple(divisor, int(value))
            if divisor > MAX_DIVISOR:
                raise GrammarFault(at, f"multiples of {divisor} are too many to tell apart; {MAX_DIVISOR} is the most")
        low, high = bounds.integers()
        if divisor > 1:
            return regex.automaton_expression(numbers.multiples(low, high, divisor), self.json.rules)
        return self.json.rules.add(numbers.integers(low, high), "integer")

    def _string(self, branch: Branch) -> Expression:
        least, most = self._range(branch, "minLength", "maxLength")
        trees = self._patterns(branch)
        if not trees:
            return self.json.strings.sized(least, most)
        if most is not None and least > most:
            return NEVER
        whole = [_unanchored(tree) for tree, _ in trees]
        if len(trees) == 1 and whole[0] is not None:
            counted = _counted(whole[0], least, most)
            if counted is not None:
                return self.json.strings.matching(counted)
        machines: list[Machine] = [Pattern(tree, is_search=is_search) for tree, is_search in trees]
        machines += [Length(least, most)] if (least, most) != (0, None) else []
        return self.json.strings.accepted(automaton(machines))

    def _patterns(self, branch: Branch) -> list[tuple[Expression, bool]]:
        """The patterns and formats of a branch, and whether they are found anywhere in the text."""
        trees: dict[tuple[Expression, bool], None] = {}
        for at, pattern in self._schemas(branch, "pattern"):
            trees[(self._tree(pattern, at), True)] = None
        for at, name in self._schemas(branch, "format"):
            if name in REFUSED:
                raise GrammarFault(at, f"the format {name!r} is not supported")
            if (tree := format_tree(name)) is not None:
                trees[(sequence(Anchor("^"), tree, Anchor("$")), True)] = None
        return list(trees)

    def _tree(self, pattern: str, at: str) -> Expression:
        try:
            return regex.parse(pattern)
        except GrammarFault as fault:
            raise GrammarFault(at, str(fault)) from None

    def _array(self, branch: Branch) -> Expression:
        least, most = self._range(branch, "minItems", "maxItems")
        prefixes = [len(items) for _, items in self._schemas(branch, "prefixItems")]
        count = max(prefixes, default=0)
        listed = []
        for index in range(count):
            places = self.branches.item(branch, index)
            if places is None:
                most = index if most is None else min(most, index)
                break
            listed.append((self.value(places), index < least))
        is_open = (
            not prefixes or least > count or any(self._schemas(branch, name) for name in ("items", "unevaluatedItems"))
        )
        places = self.branches.item(branch, count) if is_open and (most is None or most > count) else None
        if any(value for _, value in self._schemas(branch, "uniqueItems")) and (most is None or most > 1):
            return self._unique(branch, places, count, least, most)
        members = Members(tuple(listed), self.value(places), least, most, self.json.comma, repeats=False)
        return self._enclosed("[", members, "]")

    def _unique(self, branch: Branch, places: Places | None, count: int, least: int, most: int | None) -> Expression:
        """Arrays of different items: those of a short list of values."""
        at = next(at for at, value in self._schemas(branch, "uniqueItems") if value)
        values: dict[Any, Any] = {}
        for one in self.branches.of(places or ()):
            found = self.branches.values(one)
            if count or not places or found is None or len(values) + len(found) > MAX_UNIQUE:
                raise GrammarFault(
                    at, f"'uniqueItems' is supported for items of an enum of at most {MAX_UNIQUE} values, or one item"
                )
            values |= {key(value): value for value in found}
        rows: dict[frozenset[Any], Expression] = {}

        def after(used: frozenset[Any]) -> Expression:
            if used not in rows:
                options: list[Expression] = [EMPTY] if len(used) >= least else []
                for name, value in values.items():
                    if name not in used and (most is None or len(used) < most):
                        comma = self.json.comma if used else EMPTY
                        options.append(sequence(comma, self.json.fixed(value), after(used | {name})))
                rows[used] = self.json.rules.add(choice(options), "different")
            return rows[used]

        return self.json.rules.add(self.json.enclosed("[", after(frozenset()), "]"), "array")

    def _object(self, branch: Branch) -> Expression:
        least, most = self._range(branch, "minProperties", "maxProperties")
        listed = self._listed(branch, lambda name, places: self.json.member(self.json.fixed(name), self.value(places)))
        if listed is None:
            return NEVER
        names = list({*self._names(branch), *branch.forbidden})
        other = self._others(branch, names, is_needed=least > len(listed))
        return self._enclosed("{", Members(listed, other, least, most, self.json.comma, repeats=True), "}")

    def _names(self, branch: Branch) -> dict[str, None]:
        """The declared members, and then those that must be there."""
        names = dict.fromkeys(name for _, found in self._schemas(branch, "properties") for name in found)
        return names | dict.fromkeys(sorted(branch.required - set(names)))

    def _listed(
        self, branch: Branch, write: Callable[[str, Places], Expression]
    ) -> tuple[tuple[Expression, bool], ...] | None:
        """The members of `_names`, each with whether it must be there; None where one must that cannot."""
        listed = []
        for name in self._names(branch):
            places = self.branches.member(branch, name)
            value = NEVER if places is None else write(name, places)
            if value != NEVER:
                listed.append((value, name in branch.required))
            elif name in branch.required:
                return None
        return tuple(listed)

    def _others(self, branch: Branch, names: Sequence[str], *, is_needed: bool) -> Expression:
        """A member that is not declared."""
        patterns = {pattern: at for at, found in self._schemas(branch, "patternProperties") for pattern in found}
        if len(patterns) > MAX_PATTERNS:
            at = next(iter(patterns.values()))
            raise GrammarFault(at, f"at most {MAX_PATTERNS} patterns for the names of members are supported")
        speaks = any(self._schemas(branch, name) for name in ("additionalProperties", "unevaluatedProperties"))
        is_closed = not speaks and not is_needed and bool(self._schemas(branch, "properties") or patterns)
        options: list[Expression] = []
        for chosen in product((True, False), repeat=len(patterns)):
            if is_closed and not any(chosen):
                continue
            options.append(self._other(branch, names, dict(zip(patterns, chosen, strict=True)), patterns))
        return self.json.rules.add(choice(option for option in options if option != NEVER), "other")

    def _other(
        self, branch: Branch, names: Sequence[str], chosen: Mapping[str, bool], ats: Mapping[str, str]
    ) -> Expression:
        """A member whose name some patterns match and the others do not."""
        places: list[str] = []
        for place in branch.places:
            schema = self.branches.schema(place)
            own = [pattern for pattern in schema.get("patternProperties", {}) if chosen[pattern]]
            places += [below(place, "patternProperties", pattern) for pattern in own]
            if not own and "additionalProperties" in schema:
                places.append(below(place, "additionalProperties"))
        for rest, beside in branch.rests:
            schemas = [self.branches.schema(place) for place in beside]
            said = any(
                "additionalProperties" in schema or any(chosen[one] for one in schema.get("patternProperties", {}))
                for schema in schemas
            )
            if "unevaluatedProperties" in self.branches.schema(rest) and not said:
                places.append(below(rest, "unevaluatedProperties"))
        telling = self.branches.telling(places)
        if telling is None:
            return NEVER
        name = self._name(branch, names, {self._tree(one, ats[one]): is_met for one, is_met in chosen.items()})
        return NEVER if name == NEVER else self.json.member(name, self.value(telling))

    def _name(self, branch: Branch, names: Sequence[str], chosen: Mapping[Expression, bool]) -> Expression:
        """The name of a member that is not declared."""
        machines: list[Machine] = []
        for tree, is_met in chosen.items():
            machine = Pattern(tree, is_search=True)
            machines.append(machine if is_met else Without(machine))
        for at, _ in self._schemas(branch, "propertyNames"):
            machines += self._name_machines(at)
        if names and (taken := _taken_names(names, [tree for tree, is_met in chosen.items() if is_met])) != NEVER:
            machines.append(Without(Pattern(taken, is_search=False)))
        return self.json.strings.accepted(automaton(machines)) if machines else self.json.strings.any()

    def _name_machines(self, place: str) -> list[Machine]:
        """What a schema says about names."""
        found = [one for one in self.branches.at(place) if "string" in self.branches.types(one)]
        if not found:
            return [Pattern(NEVER, is_search=False)]
        if len(found) > 1:
            raise GrammarFault(place, "names of members may have one schema, without alternatives in it")
        values = self.branches.values(found[0])
        if values is not None:
            texts = [Text(value) for value in values if isinstance(value, str)]
            return [Pattern(choice(texts), is_search=False)]
        machines: list[Machine] = [Pattern(tree, is_search=is_search) for tree, is_search in self._patterns(found[0])]
        least, most = self._range(found[0], "minLength", "maxLength")
        return machines + ([Length(least, most)] if (least, most) != (0, None) else [])

    def _enclosed(self, opening: str, members: Members, closing: str) -> Expression:
        """The members between brackets."""
        if members.most is not None and members.least > members.most:
            return NEVER
        empty, some = self._first(members)
        options = [self.json.enclosed(opening, some, closing)] if some != NEVER else []
        options += [sequence(Text(opening), self.json.blanks, Text(closing))] if empty else []
        return self.json.rules.add(choice(options), "object" if opening == "{" else "array")

    def _first(self, members: Members) -> tuple[bool, Expression]:
        """Whether there may be no members, and at least one of them.

        Written from the end: `rows[c]` is what may follow when c members are there, as far as counts still matter.
        """
        listed, cap = members.listed, self._cap(members)
        rows = [self._more(members, count) for count in range(cap + 1)]
        for item, is_required in reversed(listed):
            rows = [self._with(item, rows, count, cap, members, is_required) for count in range(cap + 1)]
        is_empty = members.least == 0 and not any(is_required for _, is_required in listed)
        return is_empty, rows[0]

    def _cap(self, members: Members) -> int:
        """Up to which count it matters how many members there are; one, where it only matters for the comma."""
        count = len(members.listed)
        num_required = sum(is_required for _, is_required in members.listed)
        has_least = members.least > num_required
        has_most = members.most is not None and (members.most < count or members.other != NEVER)
        cap = max(1, min(members.least, count) if has_least else 1, min(members.most or 0, count) if has_most else 1)
        if cap * count > 20_000:
            raise GrammarFault("#", "there are too many members to count them")
        return cap

    def _with(
        self, item: Expression, rows: list[Expression], count: int, cap: int, members: Members, is_required: bool
    ) -> Expression:
        """One more member and the rest, or the rest alone; `count` members are there before."""
        has_room = members.most is None or count < members.most
        comma = members.comma if count else EMPTY
        taken = sequence(comma, item, rows[min(count + 1, cap)]) if has_room else NEVER
        if is_required:
            return taken
        # an item that is not there ends the array: the next one cannot take its place
        without = rows[count] if members.repeats else EMPTY if count else NEVER
        return self.json.rules.add(choice(option for option in (taken, without) if option != NEVER), "then")

    def _more(self, members: Members, count: int) -> Expression:
        """Members that are not listed, `count` ones being there. With none at all it is NEVER: see `_first`."""
        lacking = max(0, members.least - count)
        room = None if members.most is None else members.most - count
        may_end = lacking == 0 and count > 0
        if members.other == NEVER or (room is not None and room <= 0) or (members.repeats and lacking > 1):
            return EMPTY if may_end else NEVER
        following = self.json.rules.add(sequence(members.comma, members.other), "more")
        if count:
            return Repeat(following, lacking, room)
        rest = None if room is None else room - 1
        return sequence(members.other, Repeat(following, max(0, lacking - 1), rest))


def _unanchored(tree: Expression) -> Expression | None:
    """A tree without the anchors at both its ends; None where it has others, or lacks one of them."""
    if not isinstance(tree, Row) or tree.parts[0] != Anchor("^") or tree.parts[-1] != Anchor("$"):
        return None
    inner = sequence(*tree.parts[1:-1])
    return None if regex.has_anchor(inner) else inner


def _counted(tree: Expression, least: int, most: int | None) -> Expression | None:
    """A tree whose texts have `least` to `most` characters; None where that takes an automaton."""
    shortest, longest = _lengths(tree)
    if shortest >= least and (most is None or (longest is not None and longest <= most)):
        return tree
    if isinstance(tree, Repeat) and isinstance(tree.part, Char):
        low, highs = max(least, tree.least), [high for high in (most, tree.most) if high is not None]
        high = min(highs) if highs else None
        return NEVER if high is not None and low > high else Repeat(tree.part, low, high)
    return None


def _lengths(tree: Expression) -> tuple[int, int | None]:
    """The least and the greatest number of characters of a tree's texts."""
    match tree:
        case Text(text):
            return len(text), len(text)
        case Row(parts):
            pairs = [_lengths(part) for part in parts]
            highs = [high for _, high in pairs if high is not None]
            return sum(low for low, _ in pairs), sum(highs) if len(highs) == len(pairs) else None
        case Choice(options):
            pairs = [_lengths(option) for option in options] or [(0, 0)]
            highs = [high for _, high in pairs if high is not None]
            return min(low for low, _ in pairs), max(highs) if len(highs) == len(pairs) else None
        case Repeat(part, least, most):
            low, high = _lengths(part)
            return low * least, None if high is None or most is None else high * most
    return 1, 1


def _taken_names(names: Sequence[str], patterns: Sequence[Expression]) -> Expression:
    """The names that others may not have: the declared ones, and of many of them all that begin alike."""
    names = [name for name in names if all(matches(tree, name, is_search=True) for tree in patterns)]
    length = max(map(len, names), default=0)
    while (
        length > 1
        and len({name[:end] for name in names for end in range(1, min(length, len(name)) + 1)}) > _MAX_NAME_STEPS
    ):
        length -= 1
    anything = Repeat(Char(characters.ALL), 0, None)
    return choice(Text(name) if len(name) <= length else sequence(Text(name[:length]), anything) for name in names)
