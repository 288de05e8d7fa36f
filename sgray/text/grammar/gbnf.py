"""Grammars that clients write in GBNF, llama.cpp's notation: read, checked and written again.

Written again, because engines read parts of the notation differently (how long `\\xNN` is, for one). A rule ends where
the next one begins. Left recursion is allowed. Look-ahead and other extensions of single engines are not.
"""

from __future__ import annotations

import re
import string
from typing import NoReturn

from sgray.text.grammar import characters, regex
from sgray.text.grammar.characters import Ranges
from sgray.text.grammar.expressions import Char, Expression, Rule, Text, char, choice, sequence
from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.rules import Rules

MAX_CHARS = 500_000
ROOT = "root"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_BLANKS = re.compile(r"(?:\s|#[^\n]*)*")
_RULE = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)(?:\s|#[^\n]*)*::=")
_COUNT = re.compile(r"\{\s*([0-9]{1,9})\s*(,?)\s*([0-9]{0,9})\s*\}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0", "e": "\x1b"}
_CODES = {"x": 2, "u": 4, "U": 8}


def read_gbnf(source: str) -> str:
    """The same grammar, checked. Raises GrammarFault with the line and column of what is wrong."""
    if len(source) > MAX_CHARS:
        raise GrammarFault("", f"the grammar has {len(source)} characters, at most {MAX_CHARS} are allowed")
    rules = Rules()
    root = gbnf_expression(source, rules)
    grammar = rules.grammar(root)
    if grammar is None:
        raise GrammarFault("", "no text is ever complete by this grammar")
    return grammar


def gbnf_expression(source: str, rules: Rules) -> Expression:
    """The root of a grammar, whose rules are written into `rules`."""
    return _Reader(source, rules).read()


class _Reader:
    """Recursive descent over `source` from `position`."""

    def __init__(self, source: str, rules: Rules) -> None:
        self._source = source
        self._position = 0
        self._rules = rules
        self._names: dict[str, Rule] = {}
        self._defined: set[str] = set()
        self._first_use: dict[str, int] = {}

    def read(self) -> Expression:
        self._blanks()
        while self._position < len(self._source):
            self._definition()
        for name, at in self._first_use.items():
            if name not in self._defined:
                self._fail(f"the rule {name!r} is not defined", at)
        if ROOT not in self._defined:
            raise GrammarFault("", f"there is no rule called {ROOT!r}, with which a text begins")
        return self._names[ROOT]

    def _definition(self) -> None:
        begin = self._position
        match = _RULE.match(self._source, begin)
        if match is None:
            self._fail("a rule belongs here, as in: name ::= ...", begin)
        if match[1] in self._defined:
            self._fail(f"the rule {match[1]!r} is defined twice", begin)
        self._defined.add(match[1])
        self._position = match.end()
        body = self._alternatives(0)
        if regex.size(body) > regex.MAX_SIZE:
            self._fail(f"the rule {match[1]!r} has more than {regex.MAX_SIZE} characters with its repeats", begin)
        self._rules.define(self._rule(match[1]), body)

    def _rule(self, name: str) -> Rule:
        if name not in self._names:
            self._names[name] = self._rules.reserve("rule")
        return self._names[name]

    def _alternatives(self, depth: int) -> Expression:
        if depth > regex.MAX_NESTING:
            self._fail(f"groups are nested in more than {regex.MAX_NESTING} levels")
        options = [self._sequence(depth)]
        while self._accept("|"):
            options.append(self._sequence(depth))
        return choice(options)

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        self._blanks()
        while (sign := self._peek()) and sign not in "|)" and not _RULE.match(self._source, self._position):
            parts.append(self._repeated(self._element(sign, depth)))
            self._blanks()
        if not parts and (not sign or sign in "|)" or _RULE.match(self._source, self._position)):
            return Text("")
        return sequence(*parts)

    def _element(self, sign: str, depth: int) -> Expression:
        begin = self._position
        name = _NAME.match(self._source, begin)
        if name is not None:
            self._position = name.end()
            if self._peek() == "(":
                self._fail(f"{name[0]}(...) is an extension that is not supported", begin)
            self._first_use.setdefault(name[0], begin)
            return self._rule(name[0])
        self._position += 1
        if sign == "(":
            if self._peek() == "=":
                self._fail("look-ahead is not supported", begin)
            inner = self._alternatives(depth + 1)
            if not self._accept(")"):
                self._fail("this group is never closed", begin)
            return inner
        if sign == '"':
            return self._text(begin)
        if sign == "[":
            return char(self._class(begin))
        if sign == ".":
            return Char(characters.ALL)
        self._fail("this sign has no meaning here", begin)

    def _repeated(self, part: Expression) -> Expression:
        self._blanks()
        begin = self._position
        count: tuple[int, int | None] | None = None
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                count = bounds
        if count is None and self._peek() == "{":
            match = _COUNT.match(self._source, begin)
            if match is None:
                self._fail("a count belongs here: {3}, {3,} or {3,5}", begin)
            self._position = match.end()
            least = int(match[1])
            count = (least, (int(match[3]) if match[3] else None) if match[2] else least)
        if count is None:
            return part
        if count[1] is not None and count[0] > count[1]:
            self._fail(f"the lower bound {count[0]} is above the upper bound {count[1]}", begin)
        return self._repeated(regex.repeated(part, *count))

    def _text(self, begin: int) -> Expression:
        found: list[Expression] = []
        while not self._accept('"', skip=False):
            found.append(char(self._char(begin, "this text is never closed")))
        text = "".join(chr(one.ranges[0][0]) for one in found if isinstance(one, Char))
        return Text(text)

    def _class(self, begin: int) -> Ranges:
        is_negated = self._accept("^", skip=False)
        pairs: list[tuple[int, int]] = []
        while not self._accept("]", skip=False):
            at = self._position
            low = high = self._char(begin, "this class is never closed")[0][0]
            if self._peek() == "-" and self._source[self._position + 1 : self._position + 2] not in ("", "]"):
                self._position += 1
                high = self._char(begin, "this class is never closed")[0][0]
            if low > high:
                self._fail("the range is in the wrong order", at)
            pairs.append((low, high))
        found = characters.ranges(pairs)
        return characters.complement(found) if is_negated else found

    def _char(self, begin: int, reason: str) -> Ranges:
        """One character of a text or a class, as a set."""
        at, sign = self._position, self._peek()
        self._position += 1
        if not sign or sign == "\n":
            self._fail(reason, begin)
        if sign == "\\":
            sign = self._peek()
            self._position += 1
            if sign in _CODES and sign:
                sign = self._code(at, _CODES[sign])
            elif sign in _ESCAPES and sign:
                sign = _ESCAPES[sign]
            elif not sign or sign not in string.punctuation + " ":
                self._fail("this escape is not known", at)
        if not (found := characters.of(sign)):
            self._fail("half of a surrogate pair is no character", at)
        return found

    def _code(self, at: int, length: int) -> str:
        digits = self._source[self._position : self._position + length]
        if len(digits) < length or not set(digits) <= set(string.hexdigits) or int(digits, 16) > characters.LAST:
            self._fail(f"{length} hexadecimal digits of a character belong here", at)
        self._position += length
        return chr(int(digits, 16))

    def _peek(self) -> str:
        return self._source[self._position : self._position + 1]

    def _accept(self, sign: str, *, skip: bool = True) -> bool:
        if skip:
            self._blanks()
        is_next = self._peek() == sign
        self._position += is_next
        return is_next

    def _blanks(self) -> None:
        match = _BLANKS.match(self._source, self._position)
        assert match is not None
        self._position = match.end()

    def _fail(self, reason: str, at: int | None = None) -> NoReturn:
        place = self._position if at is None else at
        line = self._source.count("\n", 0, place) + 1
        column = place - self._source.rfind("\n", 0, place)
        shown = self._source[place : place + 12]
        raise GrammarFault(f"line {line}, column {column}" + (f" ({shown!a})" if shown else ""), reason)
