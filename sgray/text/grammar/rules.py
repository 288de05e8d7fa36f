"""The rules of a grammar under construction, and the grammar that they make."""

from __future__ import annotations

from collections.abc import Sequence

from sgray.text.grammar.expressions import (
    EMPTY,
    NEVER,
    Choice,
    Expression,
    Repeat,
    Rule,
    choice,
    sequence,
    write,
)
from sgray.text.grammar.expressions import Sequence as Row
from sgray.text.grammar.faults import GrammarFault

MAX_RULES = 20_000


class Rules:
    """Rules by name. Equal expressions become one rule."""

    def __init__(self) -> None:
        self._bodies: dict[str, Expression] = {}
        self._known: dict[Expression, Rule] = {}

    def reserve(self, hint: str) -> Rule:
        """A rule whose body comes later, so that it may be used inside itself."""
        if len(self._bodies) >= MAX_RULES:
            raise GrammarFault("", f"the grammar would have more than {MAX_RULES} rules")
        rule = Rule(f"{hint}_{len(self._bodies)}")
        self._bodies[rule.name] = NEVER
        return rule

    def define(self, rule: Rule, body: Expression) -> None:
        """Give a reserved rule its body."""
        self._bodies[rule.name] = body

    def add(self, body: Expression, hint: str) -> Expression:
        """A rule of this body; what is short stays as it is."""
        if isinstance(body, Rule) or body in (EMPTY, NEVER):
            return body
        if body not in self._known:
            rule = self.reserve(hint)
            self.define(rule, body)
            self._known[body] = rule
        return self._known[body]

    def ends(self, expressions: Sequence[Expression]) -> list[bool]:
        """Which of the expressions some text completes."""
        finite = _finite(self._bodies)
        return [_ends(expression, finite) for expression in expressions]

    def grammar(self, root: Expression) -> str | None:
        """The grammar in GBNF, `root` first; None where no text ends it.

        What can never be completed is left out, since a model that took it would never come to an end.
        """
        bodies = self._bodies | {"root": root}
        finite = _finite(bodies)
        if "root" not in finite:
            return None
        merged = _merged({name: _pruned(body, finite) for name, body in bodies.items() if name in finite})
        return "\n".join(f"{name} ::= {write(merged[name])}" for name in _used(merged))


def _finite(bodies: dict[str, Expression]) -> set[str]:
    """The rules that some text completes."""
    users: dict[str, set[str]] = {}
    for name, body in bodies.items():
        for used in _names(body):
            users.setdefault(used, set()).add(name)
    finite: set[str] = set()
    todo = list(bodies)
    while todo:
        name = todo.pop()
        if name not in finite and _ends(bodies[name], finite):
            finite.add(name)
            todo += users.get(name, ())
    return finite


def _ends(body: Expression, finite: set[str]) -> bool:
    match body:
        case Rule(name):
            return name in finite
        case Row(parts):
            return all(_ends(part, finite) for part in parts)
        case Choice(options):
            return any(_ends(option, finite) for option in options)
        case Repeat(part, least, _):
            return least == 0 or _ends(part, finite)
    return True


def _pruned(body: Expression, finite: set[str]) -> Expression:
    match body:
        case Choice(options):
            return choice(_pruned(option, finite) for option in options if _ends(option, finite))
        case Row(parts):
            return sequence(*(_pruned(part, finite) for part in parts))
        case Repeat(part, least, most):
            return Repeat(_pruned(part, finite), least, most) if _ends(part, finite) else EMPTY
    return body


def _merged(bodies: dict[str, Expression]) -> dict[str, Expression]:
    """The same with rules of equal bodies made one, and without rules that only name another.

    Every rule costs the compiler of the engine time, and schemas say the same thing in many places.
    """
    while True:
        first: dict[Expression, Expression] = {}
        others: dict[str, Expression] = {}
        for name, body in bodies.items():
            if name != "root":
                kept = body if isinstance(body, Rule) else first.setdefault(body, Rule(name))
                if kept != Rule(name):
                    others[name] = kept
        if not others:
            return bodies
        bodies = {name: _replaced(body, others) for name, body in bodies.items() if name not in others}


def _replaced(body: Expression, others: dict[str, Expression]) -> Expression:
    match body:
        case Rule():
            while isinstance(body, Rule) and body.name in others:  # never in a circle: every rule has an end
                body = others[body.name]
            return body
        case Row(parts):
            return sequence(*(_replaced(part, others) for part in parts))
        case Choice(options):
            return choice(_replaced(option, others) for option in options)
        case Repeat(part, least, most):
            return Repeat(_replaced(part, others), least, most)
    return body


def _names(body: Expression) -> list[str]:
    match body:
        case Rule(name):
            return [name]
        case Row(parts) | Choice(parts):
            return [name for part in parts for name in _names(part)]
        case Repeat(part, _, _):
            return _names(part)
    return []


def _used(bodies: dict[str, Expression]) -> list[str]:
    """The rules that can be reached from the root, which comes first."""
    found = {"root": None}
    todo = ["root"]
    while todo:
        fresh = [name for name in _names(bodies[todo.pop()]) if name not in found]
        found |= dict.fromkeys(fresh)
        todo += fresh
    return list(found)
