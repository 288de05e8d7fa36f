"""Pieces of JSON as grammars: blanks, strings by their length or by a pattern, fixed values, and any value at all.

Blanks between tokens are a blank, or a line end with some indentation: enough for both usual styles, and never endless.
The length of a string counts characters, not what escapes make of them. Where that would cost too much, fewer spellings
are offered, never more: see `Strings`. Knows no schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgray.text.grammar import characters
from sgray.text.grammar.automata import Automaton
from sgray.text.grammar.characters import Ranges
from sgray.text.grammar.expressions import (
    EMPTY,
    NEVER,
    Char,
    Choice,
    Expression,
    Repeat,
    Rule,
    Text,
    choice,
    optional,
    sequence,
)
from sgray.text.grammar.expressions import Sequence as Row
from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.rules import Rules

MAX_INDENTATION = 32
MAX_DIGITS = 20
"""Digits of a number before and behind its point, where a schema does not bound it."""

EXACT_CHARS = 8
"""Strings bounded by so many characters may be spelled in any way."""
_STEPS = 16

_HEX = characters.of("0123456789abcdefABCDEF")
_MUST_ESCAPE = characters.union(characters.of('"\\'), ((0, 0x1F),))
_RAW = characters.complement(_MUST_ESCAPE)
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_WORDS: Mapping[bool | None, str] = {None: "null", True: "true", False: "false"}
_PYTHON_WORDS: Mapping[bool | None, str] = {None: "None", True: "True", False: "False"}
_QUOTE = Text('"')
_DIGIT = Char(characters.DIGITS)
_NOT_ZERO = Char(characters.of("123456789"))


class Json:
    """Writes JSON into `rules`, or with `is_python` the same values as Python's literals.

    `avoid`: characters that do not occur in any string, but as codes.
    """

    def __init__(self, rules: Rules, *, is_python: bool = False, avoid: str = "") -> None:
        self.rules = rules
        self._avoid = avoid
        self._words = _PYTHON_WORDS if is_python else _WORDS
        # Two texts and not a set of characters: the compiler spends a millisecond on every repetition of a set.
        indentation = Repeat(choice((Text(" "), Text("\t"))), 0, MAX_INDENTATION)
        spaced = choice((EMPTY, Text(" "), sequence(Text("\n"), indentation)))
        self.blanks = rules.add(spaced, "blanks")
        self.strings = Strings(rules, is_python=is_python, avoid=characters.of(avoid))
        self._any: Rule | None = None

    @property
    def comma(self) -> Expression:
        """Between members and items."""
        return sequence(self.blanks, Text(","), self.blanks)

    def member(self, name: Expression, value: Expression) -> Expression:
        """A name, as JSON, with its value."""
        return sequence(name, self.blanks, Text(":"), self.blanks, value)

    def enclosed(self, opening: str, inner: Expression, closing: str) -> Expression:
        """Members or items between their brackets."""
        return sequence(Text(opening), self.blanks, inner, self.blanks, Text(closing))

    def anything(self) -> Rule:
        """Any value."""
        if self._any is None:
            self._any = self.rules.reserve("any")
            options = [self.any_object(), self.any_array(), self.strings.any(), self.number()]
            self.rules.define(self._any, choice([*options, *map(Text, self._words.values())]))
        return self._any

    def any_object(self) -> Expression:
        """An object of any members."""
        member = self.rules.add(self.member(self.strings.any(), self.anything()), "member")
        return self.rules.add(choice((self.enclosed("{", EMPTY, "}"), self._listed("{", member, "}"))), "object")

    def any_array(self) -> Expression:
        """An array of any items."""
        return self.rules.add(
            choice((self.enclosed("[", EMPTY, "]"), self._listed("[", self.anything(), "]"))), "array"
        )

    def _listed(self, opening: str, item: Expression, closing: str) -> Expression:
        more = Repeat(self.rules.add(sequence(self.comma, item), "more"), 0, None)
        return self.enclosed(opening, sequence(item, more), closing)

    def integer(self) -> Expression:
        """Any integer of a bounded number of digits."""
        digits = choice((Text("0"), sequence(_NOT_ZERO, Repeat(_DIGIT, 0, MAX_DIGITS - 1))))
        return self.rules.add(sequence(optional(Text("-")), digits), "integer")

    def number(self) -> Expression:
        """Any number of a bounded number of digits."""
        fraction = optional(sequence(Text("."), Repeat(_DIGIT, 1, MAX_DIGITS)))
        sign = optional(Char(characters.of("+-")))
        exponent = optional(sequence(Char(characters.of("eE")), sign, Repeat(_DIGIT, 1, 2)))
        return self.rules.add(sequence(self.integer(), fraction, exponent), "number")

    def fixed(self, value: Any) -> Expression:
        """One value, its strings and numbers in their shortest spelling."""
        if isinstance(value, dict):
            members = [self.member(self.fixed(str(name)), self.fixed(inner)) for name, inner in value.items()]
            return self.enclosed("{", self._joined(members), "}")
        if isinstance(value, list):
            return self.enclosed("[", self._joined([self.fixed(item) for item in value]), "]")
        if value is None or isinstance(value, bool):
            return Text(self._words[value])
        if isinstance(value, float) and value == int(value):
            return choice((Text(str(int(value))), Text(spelled(value))))
        return Text(self._spelled(value))

    def one_of(self, values: Sequence[Any]) -> Expression:
        """Any of several values; strings that begin alike share their beginnings."""
        texts = [self._spelled(value) for value in values if isinstance(value, str)]
        others = [self.fixed(value) for value in values if not isinstance(value, str)]
        return choice([*others, self.shared(texts)])

    def _spelled(self, value: Any) -> str:
        text = spelled(value)
        for sign in self._avoid:
            text = text.replace(sign, f"\\u{ord(sign):04x}")
        return text

    def _joined(self, parts: list[Expression]) -> Expression:
        joined: list[Expression] = []
        for part in parts:
            joined += [self.comma, part] if joined else [part]
        return sequence(*joined)

    def shared(self, texts: Sequence[str], depth: int = 0) -> Expression:
        """A tree of texts by their beginnings: the engine is slow with thousands that are side by side."""
        if len(texts) < 16 or depth > 100:
            return choice(Text(text) for text in texts)
        groups: dict[str, list[str]] = {}
        for text in texts:
            groups.setdefault(text[:1], []).append(text)
        options: list[Expression] = []
        for members in groups.values():
            begin = _common_beginning(members)
            rests = self.shared([text[len(begin) :] for text in members], depth + 1)
            options.append(sequence(Text(begin), self.rules.add(rests, "rest")))
        return choice(options)


class Strings:
    """JSON strings.

    Of a string bounded by more than EXACT_CHARS characters only part of the spellings is offered: an escape may take
    the place of several characters of the bound, none is spelled with a code, and a string of at least so many
    characters begins with that many that need no escape. A string that must match a pattern is written without codes,
    and its long counted parts without escapes.
    """

    def __init__(self, rules: Rules, *, is_python: bool = False, avoid: Ranges = characters.NOTHING) -> None:
        self._rules = rules
        self._avoid = avoid
        self._raw = characters.difference(_RAW, avoid)
        self._short = characters.of('"\\bfnrt' + ("" if is_python else "/"))
        self._counted: dict[tuple[int, int | None], Expression] = {}
        self._rest: Rule | None = None

    def any(self) -> Expression:
        """Any string."""
        return sequence(_QUOTE, self._free())

    def sized(self, least: int, most: int | None) -> Expression:
        """A string of `least` to `most` characters."""
        if most is not None and least > most:
            return NEVER
        return sequence(_QUOTE, self._sized(least, most))

    def matching(self, tree: Expression) -> Expression:
        """A string whose whole value a tree without anchors describes."""
        return sequence(_QUOTE, spelling(tree, self._avoid), _QUOTE)

    def accepted(self, automaton: Automaton) -> Expression:
        """A string whose value an automaton accepts."""
        if not automaton.edges:
            return NEVER
        states = [self._rules.reserve("chars") for _ in automaton.edges]
        for state, (rule, edges) in enumerate(zip(states, automaton.edges, strict=True)):
            options: list[Expression] = [_QUOTE] if state in automaton.accepting else []
            if options and edges == {state: characters.ALL}:
                self._rules.define(rule, self._free())
                continue
            for target, given in edges.items():
                options += [sequence(option, states[target]) for option in spellings(given, self._avoid)]
            self._rules.define(rule, choice(options))
        return sequence(_QUOTE, states[0])

    def _free(self) -> Expression:
        """Any characters and the closing quote. Recursion to the right and no rule for a character: that is fast."""
        if self._rest is None:
            self._rest = self._rules.reserve("string")
            self._rules.define(self._rest, choice([_QUOTE, *self._then(self._rest)]))
        return self._rest

    def _then(self, rest: Expression) -> list[Expression]:
        """One character, however it is spelled, and then the rest."""
        return [
            sequence(Char(self._raw), rest),
            sequence(self._escape(), rest),
            sequence(Text("\\u"), self._code(), rest),
        ]

    def _code(self) -> Expression:
        """The digits of a code; halves of surrogate pairs come in pairs alone."""
        digit, halves = Char(_HEX), Char(characters.of("dD"))
        plain = choice(
            (
                sequence(Char(characters.difference(_HEX, characters.of("dD"))), digit, digit, digit),
                sequence(halves, Char(characters.of("01234567")), digit, digit),
            )
        )
        high = sequence(halves, Char(characters.of("89abAB")), digit, digit)
        low = sequence(halves, Char(characters.of("cdefCDEF")), digit, digit)
        return self._rules.add(choice((plain, sequence(high, Text("\\u"), low))), "code")

    def _escape(self) -> Expression:
        """A character that has an escape of one letter."""
        return sequence(Text("\\"), Char(self._short))

    def _sized(self, least: int, most: int | None) -> Expression:
        if (least, most) == (0, None):
            return self._free()
        key = (least, most)
        if key not in self._counted:
            self._counted[key] = rule = self._rules.reserve("chars")
            self._rules.define(rule, choice(self._options(least, most)))
        return self._counted[key]

    def _options(self, least: int, most: int | None) -> list[Expression]:
        """The characters and the closing quote. Counts stand before what they cannot run into: that is fast."""
        if most == 0:
            return [_QUOTE]
        if 0 < least <= EXACT_CHARS:
            return self._then(self._sized(least - 1, None if most is None else most - 1))
        if most is None:
            raw = Repeat(Char(self._raw), least, None)
            return [sequence(raw, _QUOTE), sequence(raw, self._escape(), self._free())]
        if most <= EXACT_CHARS:
            return [_QUOTE, *self._then(self._sized(0, most - 1))]
        options = [sequence(Repeat(Char(self._raw), least, most), _QUOTE)]
        taken = max(EXACT_CHARS, -(-(most - least) // _STEPS))
        while least + taken <= most:  # an escape counts as the rest of its step
            before = Repeat(Char(self._raw), least, least + taken - 1)
            options.append(sequence(before, self._escape(), self._sized(0, most - least - taken)))
            taken *= 2
        return options


def spelled(value: Any) -> str:
    """A value as JSON; raises GrammarFault for what JSON cannot say."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise GrammarFault("", "half of a surrogate pair is no text") from None
    except ValueError:
        raise GrammarFault("", f"{value} is no number of JSON") from None
    return text


def spellings(given: Ranges, avoid: Ranges = characters.NOTHING) -> list[Expression]:
    """The characters of a set inside a JSON string, each spelled in one way; those to avoid are left out."""
    given = characters.difference(given, avoid)
    raw, escaped = characters.intersection(given, _RAW), characters.difference(given, _RAW)
    options: list[Expression] = [Char(raw)] if raw else []
    short = "".join(sign for char, sign in _SHORT.items() if characters.contains(escaped, char))
    if short:
        options.append(sequence(Text("\\"), Char(characters.of(short))))
    for high in (0, 1):
        codes = [code for code in range(high * 16, high * 16 + 16) if chr(code) not in _SHORT]
        digits = "".join(f"{code % 16:x}" for code in codes if characters.contains(escaped, chr(code)))
        if digits:
            options.append(sequence(Text(f"\\u00{high}"), Char(characters.of(digits))))
    return options


def spelling(tree: Expression, avoid: Ranges = characters.NOTHING) -> Expression:
    """What a tree without anchors and rules describes, as the inside of a JSON string."""
    match tree:
        case Text(text):
            return sequence(*(choice(spellings(characters.of(sign), avoid)) for sign in text))
        case Char(given):
            return choice(spellings(given, avoid))
        case Row(parts):
            return sequence(*(spelling(part, avoid) for part in parts))
        case Choice(options):
            return choice(spelling(option, avoid) for option in options)
        case Repeat(part, least, most):
            is_long = max(least, most or 0) > EXACT_CHARS
            plain = characters.difference(_RAW, avoid)
            raw = characters.intersection(part.ranges, plain) if isinstance(part, Char) else characters.NOTHING
            return Repeat(Char(raw) if raw and is_long else spelling(part, avoid), least, most)
    raise ValueError(f"{tree} is no tree of plain characters")


def _common_beginning(texts: Iterable[str]) -> str:
    first, *others = sorted(texts)
    last = others[-1] if others else first
    length = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return first[:length]
