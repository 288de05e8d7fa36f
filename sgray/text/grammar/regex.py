"""Regular expressions as trees: what ECMA-262 and Python both understand, and both understand alike.

What is not regular (look-around, back-references) or differs between the two is refused. Of the classes whose members
differ, only what both accept is taken: `\\d` and `\\w` are ASCII, and their opposites leave out what either excludes.
Lazy quantifiers mean the same texts as greedy ones. Does not know what the trees are for.
"""

from __future__ import annotations

import string
from typing import NoReturn

from sgray.text.grammar import characters
from sgray.text.grammar.automata import Automaton, Pattern, automaton
from sgray.text.grammar.characters import Ranges
from sgray.text.grammar.expressions import (
    EMPTY,
    NEVER,
    Anchor,
    Char,
    Choice,
    Expression,
    Repeat,
    Sequence,
    Text,
    char,
    choice,
    sequence,
)
from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.rules import Rules

MAX_CHARS = 20_000
MAX_NESTING = 60
MAX_SIZE = 10_000
"""How many characters and classes an expression may have with all its counted repeats written out."""

_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_CLASSES: dict[str, Ranges] = {
    "d": characters.DIGITS,
    "w": characters.WORD,
    "s": characters.BLANKS,
    "W": characters.difference(((0, 0x7F),), characters.WORD),
    "S": characters.complement(characters.POSSIBLE_BLANKS),
}
_DOT = characters.complement(characters.LINE_ENDS)
_GROUPS = {
    "=": "look-around is not supported",
    "!": "look-around is not supported",
    "<=": "look-around is not supported",
    "<!": "look-around is not supported",
    ">": "atomic groups are not supported",
    "#": "comments are not supported",
    "(": "conditions are not supported",
    "P=": "back-references are not supported",
}


def parse(pattern: str) -> Expression:
    """The tree of a pattern, anchors in it. Raises GrammarFault with the position of what is wrong."""
    if len(pattern) > MAX_CHARS:
        raise GrammarFault("", f"the pattern has {len(pattern)} characters, at most {MAX_CHARS} are allowed")
    parser = _Parser(pattern)
    tree = parser.alternatives(0)
    if parser.position < len(pattern):
        parser.fail("unmatched ')'")
    if (found := size(tree)) > MAX_SIZE:
        reason = f"with its repeats written out it has {found} characters, at most {MAX_SIZE} are allowed"
        raise GrammarFault("", reason)
    return tree


def size(tree: Expression) -> int:
    """How many characters and classes a tree has with its repeats written out."""
    match tree:
        case Sequence(parts) | Choice(parts):
            return sum(map(size, parts))
        case Repeat(part, least, most):
            return size(part) * max(1, least if most is None else most)
        case Text(text):
            return len(text)
        case _:
            return 1


def read_regex(pattern: str) -> str:
    """A grammar of the texts that a pattern matches as a whole; anchors at its ends say what is so anyway."""
    rules = Rules()
    grammar = rules.grammar(regex_expression(pattern, rules))
    if grammar is None:
        raise GrammarFault("", "no text matches this pattern")
    return grammar


def regex_expression(pattern: str, rules: Rules) -> Expression:
    """The same as an expression; anchors elsewhere than at the ends take an automaton."""
    tree = parse(pattern)
    parts = list(tree.parts) if isinstance(tree, Sequence) else [tree]
    inner = sequence(*parts[parts[0] == Anchor("^") : len(parts) - (parts[-1] == Anchor("$"))])
    if not has_anchor(inner):
        return inner
    found = automaton([Pattern(tree, is_search=False)])
    return automaton_expression(found, rules)


def automaton_expression(found: Automaton, rules: Rules) -> Expression:
    """What an automaton accepts, a rule a state."""
    states = [rules.reserve("state") for _ in found.edges]
    for state, (rule, edges) in enumerate(zip(states, found.edges, strict=True)):
        options: list[Expression] = [EMPTY] if state in found.accepting else []
        options += [sequence(Char(given), states[target]) for target, given in edges.items()]
        rules.define(rule, choice(options))
    return states[0] if states else NEVER


def has_anchor(tree: Expression) -> bool:
    """Whether there is an anchor anywhere in it."""
    match tree:
        case Anchor():
            return True
        case Sequence(parts) | Choice(parts):
            return any(map(has_anchor, parts))
        case Repeat(part, _, _):
            return has_anchor(part)
    return False


class _Parser:
    """Recursive descent over `pattern` from `position`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        """Raise for what stands at `at`, or here."""
        place = self.position if at is None else at
        shown = self.pattern[place : place + 12]
        raise GrammarFault(f"position {place}" + (f" ({shown!a})" if shown else ""), reason)

    def peek(self) -> str:
        return self.pattern[self.position : self.position + 1]

    def accept(self, text: str) -> bool:
        is_next = self.pattern.startswith(text, self.position)
        self.position += len(text) * is_next
        return is_next

    def alternatives(self, depth: int) -> Expression:
        if depth > MAX_NESTING:
            self.fail(f"groups are nested in more than {MAX_NESTING} levels")
        options = [self._sequence(depth)]
        while self.accept("|"):
            options.append(self._sequence(depth))
        singles = [option.ranges for option in options if isinstance(option, Char)]
        others = [option for option in options if not isinstance(option, Char)]
        return choice([*others, Char(characters.union(*singles))] if singles else others)

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while self.peek() and self.peek() not in "|)":
            begin = self.position
            parts.append(self._repeated(self._atom(depth), begin))
        return sequence(*parts)

    def _atom(self, depth: int) -> Expression:
        begin, sign = self.position, self.peek()
        self.position += 1
        match sign:
            case "(":
                return self._group(depth, begin)
            case "[":
                return char(self._class(begin))
            case "^":
                return Anchor("^")
            case "$":
                return Anchor("$")
            case ".":
                return Char(_DOT)
            case "\\":
                return char(self._escape(begin, is_class=False))
            case "*" | "+" | "?":
                self.fail("nothing to repeat", begin)
        if not characters.of(sign):
            self.fail("half of a surrogate pair is no character", begin)
        return Char(characters.of(sign))

    def _group(self, depth: int, begin: int) -> Expression:
        if self.accept("?") and not self.accept(":"):
            for sign, reason in _GROUPS.items():
                if self.pattern.startswith(sign, self.position):
                    self.fail(reason, begin)
            if not self.accept("P<") and not self.accept("<"):
                self.fail("flags are not supported, and this is no group that is known", begin)
            end = self.pattern.find(">", self.position)
            if not self.pattern[self.position : max(end, 0)].isidentifier():
                self.fail("the name of the group is missing or is no name", begin)
            self.position = end + 1
        inner = self.alternatives(depth + 1)
        if not self.accept(")"):
            self.fail("this group is never closed", begin)
        return inner

    def _repeated(self, atom: Expression, begin: int) -> Expression:
        at = self.position
        count = self._count()
        if count is None:
            return atom
        if isinstance(atom, Anchor):
            self.fail("an anchor cannot be repeated", begin)
        self.accept("?")
        if self.peek() and self.peek() in "*+?":
            self.fail("repeats of repeats are not supported; put the inner one into a group")
        least, most = count
        if most is not None and least > most:
            self.fail(f"the lower bound {least} is above the upper bound {most}", at)
        return repeated(atom, least, most)

    def _count(self) -> tuple[int, int | None] | None:
        for sign, count in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.accept(sign):
                return count
        begin = self.position
        end = self.pattern.find("}", begin)
        if self.peek() != "{" or end < 0:
            return None
        low, comma, high = self.pattern[begin + 1 : end].partition(",")
        if not low and comma and high.isdigit():
            self.fail("a repeat needs a lower bound", begin)
        if not (low.isascii() and low.isdigit()) or not (not high or (high.isascii() and high.isdigit())):
            return None
        if max(len(low), len(high)) > 9:
            self.fail("the bound is too large", begin)
        self.position = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def _class(self, begin: int) -> Ranges:
        is_negated = self.accept("^")
        if self.peek() == "]":
            self.fail("an empty class is not supported; write \\] for the bracket itself", begin)
        if self.pattern.startswith("[:", self.position):
            self.fail("POSIX classes are not supported")
        # what a negated class excludes must be all that any notation means by it
        found: list[Ranges] = []
        while not self.accept("]"):
            if not self.peek():
                self.fail("this class is never closed", begin)
            found.append(self._item(begin, is_negated=is_negated))
        both = characters.union(*found)
        return characters.complement(both) if is_negated else both

    def _item(self, begin: int, *, is_negated: bool) -> Ranges:
        at = self.position
        first = self._class_char(begin, is_negated=is_negated)
        if not (self.peek() == "-" and self.pattern[self.position + 1 : self.position + 2] not in ("", "]")):
            return first
        self.position += 1
        last = self._class_char(begin, is_negated=is_negated)
        if characters.width(first) != 1 or characters.width(last) != 1:
            self.fail("a range goes from one character to another", at)
        if first[0][0] > last[0][0]:
            self.fail("the range is in the wrong order", at)
        return characters.ranges([(first[0][0], last[0][0])])

    def _class_char(self, begin: int, *, is_negated: bool) -> Ranges:
        at, sign = self.position, self.peek()
        self.position += 1
        if sign == "\\":
            return self._escape(at, is_class=True, is_negated=is_negated)
        found = characters.of(sign)
        if not sign or not found:
            self.fail("this class is never closed" if not sign else "half of a surrogate pair is no character", begin)
        return found

    def _escape(self, begin: int, *, is_class: bool, is_negated: bool = False) -> Ranges:
        sign = self.peek()
        self.position += 1
        if sign and sign in "dDwWsS":
            return _shorthand(sign, is_negated=is_negated)
        if is_class and sign == "b":
            return characters.of("\b")
        if sign == "0" and self.peek().isdigit():
            self.fail("octal escapes are not supported", begin)
        if sign in _CONTROL and sign:
            return characters.of(_CONTROL[sign])
        if sign in ("x", "u"):
            return self._code(begin, 2 if sign == "x" else 4)
        if sign and sign in string.punctuation + " ":
            return characters.of(sign)
        reasons = {"b": "word boundaries are not supported", "B": "word boundaries are not supported"}
        reasons |= dict.fromkeys("pP", "Unicode classes are not supported")
        reasons |= dict.fromkeys("123456789k", "back-references are not supported")
        reasons |= dict.fromkeys("AZzG", "anchors are written ^ and $")
        self.fail(reasons.get(sign, "this escape is not known" if sign else "nothing stands behind the '\\'"), begin)

    def _code(self, begin: int, length: int) -> Ranges:
        code = self._hex(begin, length)
        if 0xD800 <= code < 0xDC00 and self.accept("\\u"):
            low = self._hex(begin, 4)
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else code
        if not (found := characters.ranges([(code, code)])):
            self.fail("half of a surrogate pair is no character", begin)
        return found

    def _hex(self, begin: int, length: int) -> int:
        digits = self.pattern[self.position : self.position + length]
        if len(digits) < length or not set(digits) <= set(string.hexdigits):
            self.fail(f"{length} hexadecimal digits belong here", begin)
        self.position += length
        return int(digits, 16)


def _shorthand(sign: str, *, is_negated: bool) -> Ranges:
    """The members of \\d and its like: those that are sure, or inside a negated class those that are possible."""
    if not is_negated:
        return _CLASSES[sign] if sign != "D" else characters.complement(characters.unicode_digits())
    return {
        "d": characters.unicode_digits(),
        "D": characters.complement(characters.DIGITS),
        "w": characters.union(characters.WORD, characters.ranges([(0x80, characters.LAST)])),
        "W": characters.complement(characters.WORD),
        "s": characters.POSSIBLE_BLANKS,
        "S": characters.complement(characters.BLANKS),
    }[sign]


def repeated(part: Expression, least: int, most: int | None) -> Expression:
    """A part so many times, without a repeat in it where possible: the ways to read a text must not explode."""
    if most == 0 or part == EMPTY:
        return EMPTY
    if (least, most) == (1, 1):
        return part
    if isinstance(part, Repeat) and part.least <= 1:
        highest = None if most is None or part.most is None else most * part.most
        return Repeat(part.part, least * part.least, highest)
    return Repeat(part, least, most)
