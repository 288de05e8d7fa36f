"""What a schema leaves to choose: its combinations written out as branches, each a set of places that all must hold.

`allOf`, `anyOf`, `oneOf`, `$ref` and the dependent keywords are resolved here, so whoever writes a branch sees plain
keywords alone. `oneOf` is honoured where its branches exclude each other, or can be made to: by leaving out a member
that another branch demands, or values that another branch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.schema.document import Document, below
from sgray.text.grammar.schema.numbers import Bounds
from sgray.text.grammar.schema.values import holds, item_places, key, member_places, own_keywords_hold

MAX_BRANCHES = 500
_MAX_LOOKS = 6

Places = tuple[str, ...]
TYPES = frozenset(("null", "boolean", "object", "array", "number", "integer", "string"))
_BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}


@dataclass(frozen=True)
class Branch:
    """One way to meet a schema. The schemas at all `places` hold, by the keywords that concern a value itself.

    Objects have the `required` members and none of the `forbidden` ones. None of the schemas at `unless` holds.
    `rests`: schemas that say something about what the places beside each leave unsaid.
    """

    places: Places = ()
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    is_object: bool = False
    unless: Places = ()
    rests: tuple[tuple[str, Places], ...] = ()

    def joined(self, other: Branch) -> Branch:
        """Both at once."""
        return Branch(
            tuple(dict.fromkeys(self.places + other.places)),
            self.required | other.required,
            self.forbidden | other.forbidden,
            self.is_object or other.is_object,
            tuple(dict.fromkeys(self.unless + other.unless)),
            tuple(dict.fromkeys(self.rests + other.rests)),
        )


class Branches:
    """The branches of the schemas of a document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._known: dict[str, list[Branch]] = {}
        self._open: list[str] = []

    def of(self, places: Iterable[str]) -> list[Branch]:
        """The ways to meet all schemas at once."""
        return self._all([self.at(place) for place in places], "#")

    def at(self, place: str) -> list[Branch]:
        """The ways to meet one schema; none where nothing does."""
        if place in self._open:
            raise GrammarFault(place, "this reference leads back to itself and says nothing in between")
        if place not in self._known:
            if len(self._open) > 200:
                raise GrammarFault(place, "references lead to references in more than 200 steps")
            self._open.append(place)
            try:
                self._known[place] = self._written_out(place)
            finally:
                self._open.pop()
        return self._known[place]

    def schema(self, place: str) -> Mapping[str, Any]:
        """The schema of a place in a branch."""
        schema = self.document.at(place)
        assert not isinstance(schema, bool), "a branch has no trivial places"
        return schema

    def types(self, branch: Branch) -> frozenset[str]:
        """The types that values of the branch have: without `type`, those that its keywords speak of."""
        found = frozenset(("object",)) if branch.is_object else TYPES
        has_type, spoken = branch.is_object, set()
        for place in branch.places:
            schema = self.schema(place)
            if "type" in schema:
                named = schema["type"]
                given = set(named if isinstance(named, list) else [named])
                found &= given | ({"integer"} if "number" in given else set())
                has_type = True
            spoken |= {name for name, keywords in _BY_TYPE.items() for keyword in keywords if keyword in schema}
        if has_type or not spoken or any({"const", "enum"} & set(self.schema(place)) for place in branch.places):
            return found
        return found & (spoken | ({"integer"} if "number" in spoken else set()))

    def values(self, branch: Branch) -> list[Any] | None:
        """The values of a branch where a schema lists them; None where none does."""
        lists = [
            [schema["const"]] if "const" in schema else schema["enum"]
            for schema in map(self.schema, branch.places)
            if "const" in schema or "enum" in schema
        ]
        if not lists:
            return None
        common = {key(value): value for value in lists[0]}
        for others in lists[1:]:
            allowed = {key(value) for value in others}
            common = {name: value for name, value in common.items() if name in allowed}
        return [value for value in common.values() if self._is_of(branch, value, has_lists=False)]

    def bounds(self, branch: Branch) -> Bounds:
        """The bounds of the numbers of a branch."""
        bounds = Bounds()
        for schema in map(self.schema, branch.places):
            for keyword, is_open in (("minimum", False), ("exclusiveMinimum", True)):
                if keyword in schema:
                    bounds = bounds.with_low(schema[keyword], is_open=is_open)
            for keyword, is_open in (("maximum", False), ("exclusiveMaximum", True)):
                if keyword in schema:
                    bounds = bounds.with_high(schema[keyword], is_open=is_open)
        return bounds

    def member(self, branch: Branch, name: str) -> Places | None:
        """The places of what a member must be; None where it may not be there."""
        if name in branch.forbidden:
            return None
        found: list[str] = []
        for place in branch.places:
            schema = self.schema(place)
            found += member_places(schema, place, name)
            if "propertyNames" in schema and not holds(self.document, below(place, "propertyNames"), name):
                return None
        for rest, places in branch.rests:
            said = any(member_places(self.schema(place), place, name) for place in places)
            if "unevaluatedProperties" in self.schema(rest) and not said:
                found.append(below(rest, "unevaluatedProperties"))
        return self.telling(found)

    def telling(self, places: Iterable[str]) -> Places | None:
        """The places that say something, in a fixed order; None where one of them allows nothing."""
        kept = set()
        for place in places:
            schema = self.document.at(place)
            if schema is False:
                return None
            if schema is not True and schema:
                kept.add(place)
        return tuple(sorted(kept))

    def _is_of(self, branch: Branch, value: Any, *, has_lists: bool = True) -> bool:
        """Whether a value meets the branch; without `has_lists`, one that its lists have in common."""
        if not all(own_keywords_hold(self.schema(place), value, has_lists=has_lists) for place in branch.places):
            return False
        if not self._children_hold(branch, value):
            return False
        if isinstance(value, dict) and (not branch.required <= set(value) or branch.forbidden & set(value)):
            return False
        if branch.is_object and not isinstance(value, dict):
            return False
        return not any(holds(self.document, place, value) for place in branch.unless)

    def _children_hold(self, branch: Branch, value: Any) -> bool:
        if isinstance(value, list):
            children = [(self.item(branch, index), item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            children = [(self.member(branch, name), inner) for name, inner in value.items()]
        else:
            return True
        return all(
            places is not None and all(holds(self.document, place, inner) for place in places)
            for places, inner in children
        )

    def item(self, branch: Branch, index: int) -> Places | None:
        """The places of what an item must be; None where it may not be there."""
        found: list[str] = []
        for place in branch.places:
            found += item_places(self.schema(place), place, index)
        for rest, places in branch.rests:
            said = any(item_places(self.schema(place), place, index) for place in places)
            if "unevaluatedItems" in self.schema(rest) and not said:
                found.append(below(rest, "unevaluatedItems"))
        return self.telling(found)

    def _written_out(self, place: str) -> list[Branch]:
        schema = self.document.at(place)
        if isinstance(schema, bool):
            return [Branch()] if schema else []
        factors = [[Branch((place,), frozenset(schema.get("required", ())))]]
        if "$ref" in schema:
            factors.append(self.at(self.document.target(place)))
        factors += [self.at(below(place, "allOf", index)) for index in range(len(schema.get("allOf", ())))]
        if "anyOf" in schema:
            parts = [self.at(below(place, "anyOf", index)) for index in range(len(schema["anyOf"]))]
            factors.append(list(dict.fromkeys(branch for part in parts for branch in part)))
        if "oneOf" in schema:
            factors.append(self._exclusive(place, len(schema["oneOf"])))
        for name, names in schema.get("dependentRequired", {}).items():
            factors.append([Branch(forbidden=frozenset((name,))), Branch(required=frozenset(names))])
        for name in schema.get("dependentSchemas", {}):
            present = Branch(required=frozenset((name,)))
            then = [present.joined(branch) for branch in self.at(below(place, "dependentSchemas", name))]
            factors.append([Branch(forbidden=frozenset((name,))), *then])
        found = self._all(factors, place)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            found = [replace(one, rests=(*one.rests, (place, one.places))) for one in found]
        return found

    def _all(self, factors: list[list[Branch]], place: str) -> list[Branch]:
        found = [Branch()]
        for factor in factors:
            if len(found) * len(factor) > MAX_BRANCHES:
                raise GrammarFault(place, f"these combinations come to more than {MAX_BRANCHES} cases")
            found = [one.joined(other) for one, other in product(found, factor)]
            found = [one for one in found if not one.required & one.forbidden]
        return list(dict.fromkeys(found))

    def _exclusive(self, place: str, count: int) -> list[Branch]:
        """The branches of `oneOf`, each without what another one allows as well."""
        place = below(place, "oneOf")
        parts = [self.at(below(place, index)) for index in range(count)]
        found: list[Branch] = []
        for index, part in enumerate(parts):
            for branch in part:
                only: Branch | None = branch
                for other_index, others in enumerate(parts):
                    if other_index != index and only is not None:
                        only = self._apart(only, others, below(place, other_index), below(place, index))
                found += [only] if only is not None else []
        return found

    def _apart(self, branch: Branch, others: list[Branch], other_place: str, place: str) -> Branch:
        """The branch without what any of `others` allows."""
        if self.values(branch) is not None:
            return replace(branch, unless=(*branch.unless, other_place))
        for other in others:
            if self._is_apart(branch, other, 0):
                continue
            missing = sorted(other.required - branch.required, key=lambda name: (self._is_named(branch, name), name))
            if not missing or "object" not in self.types(branch):
                reason = "this branch of oneOf may be met together with the one at "
                raise GrammarFault(place, f"{reason}{other_place}; use anyOf, or tell them apart by a required const")
            branch = replace(branch, forbidden=branch.forbidden | {missing[0]}, is_object=True)
        return branch

    def _is_named(self, branch: Branch, name: str) -> bool:
        return any(name in self.schema(place).get("properties", {}) for place in branch.places)

    def _is_apart(self, branch: Branch, other: Branch, looks: int) -> bool:
        """Whether it is certain that nothing written for `branch` meets `other`."""
        types = self.types(branch) & self._allowed_types(other)
        if not types:
            return True
        values, other_values = self.values(branch), self.values(other)
        if values is not None and not any(self._is_of(other, value) for value in values):
            return True
        if other_values is not None and not any(self._is_of(branch, value) for value in other_values):
            return True
        if types <= {"number", "integer"}:
            return self.bounds(branch).excludes(self.bounds(other))
        if types != {"object"} or looks > _MAX_LOOKS:
            return False
        return any(self._is_member_apart(branch, other, name, looks) for name in branch.required | other.required)

    def _allowed_types(self, branch: Branch) -> frozenset[str]:
        """The types of all values that meet the branch, whatever its keywords speak of."""
        is_typed = branch.is_object or any("type" in self.schema(place) for place in branch.places)
        return self.types(branch) if is_typed else TYPES

    def _is_member_apart(self, branch: Branch, other: Branch, name: str, looks: int) -> bool:
        """Whether a member that one of them demands is never what the other allows."""
        mine, theirs = self.member(branch, name), self.member(other, name)
        if name not in branch.required:
            return mine is None
        if mine is None or theirs is None:
            return True
        try:
            return all(self._is_apart(one, two, looks + 1) for one, two in product(self.of(mine), self.of(theirs)))
        except GrammarFault:  # it will be told where the member is written
            return False
