"""What texts look like, as trees: characters, sequences, choices, repeats and rules; and how GBNF writes them.

Regular expressions become such trees as well as schemas do. Anchors occur in regular expressions alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sgray.text.grammar import characters
from sgray.text.grammar.characters import Ranges

_MOST_CHARACTERS = 500_000


@dataclass(frozen=True, slots=True)
class Text:
    """A fixed text."""

    text: str


@dataclass(frozen=True, slots=True)
class Char:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning or the end of the whole text."""

    side: Literal["^", "$"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of them; none at all is a text that does not exist."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """At least `least` and at most `most` times; None is without end."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Whatever the rule of this name says."""

    name: str


Expression = Text | Char | Anchor | Sequence | Choice | Repeat | Rule

EMPTY = Text("")
NEVER = Choice(())


def sequence(*parts: Expression) -> Expression:
    """One after the other, flat and without empty parts."""
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else [] if part == EMPTY else [part]
    if NEVER in flat:
        return NEVER
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat)) if flat else EMPTY


def choice(options: Iterable[Expression]) -> Expression:
    """Any of them, flat and each once."""
    flat: dict[Expression, None] = {}
    for option in options:
        flat |= dict.fromkeys(option.options if isinstance(option, Choice) else [option])
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def optional(part: Expression) -> Expression:
    """It, or nothing."""
    return choice((part, EMPTY))


def char(given: Ranges) -> Expression:
    """A character of the set; never, where it is empty."""
    return Char(given) if given else NEVER


def write(expression: Expression) -> str:
    """The body of a rule in GBNF. Raises ValueError for what never is and for anchors."""
    match expression:
        case Choice(options) if options:
            return " | ".join(_write_inner(option) for option in options)
        case _:
            return _write_inner(expression)


def _write_inner(expression: Expression) -> str:
    match expression:
        case Text(text):
            return '"' + "".join(_in_text(char) for char in text) + '"'
        case Char(given):
            return _class(given)
        case Rule(name):
            return name
        case Sequence(parts):
            return " ".join(f"({write(part)})" if isinstance(part, Choice) else _write_inner(part) for part in parts)
        case Repeat(part, least, most):
            inner = f"({write(part)})" if isinstance(part, Sequence | Choice | Repeat) else _write_inner(part)
            return inner + _count(least, most)
        case Choice(options) if options:
            return f"({write(expression)})"
        case _:
            raise ValueError(f"{expression} cannot be written")


def _count(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _class(given: Ranges) -> str:
    """A set; one of most characters as what is not in it, for which the engine has a fast path."""
    if characters.width(given) <= _MOST_CHARACTERS:
        return "[" + "".join(_range(low, high) for low, high in given) + "]"
    missing = [*characters.complement(given), (0xD800, 0xDFFF)]
    return "[^" + "".join(_range(low, high) for low, high in sorted(missing)) + "]"


def _range(low: int, high: int) -> str:
    return _in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}"


def _in_class(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else _escaped(code)


def _in_text(char: str) -> str:
    return char if " " <= char <= "~" and char not in '"\\' else _escaped(ord(char))


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
