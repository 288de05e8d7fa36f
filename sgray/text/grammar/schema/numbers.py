"""Numbers within bounds, as trees of their digits.

A bounded number is written without exponent and without a negative zero, with at most MAX_SIGNIFICANT digits: so many
survive the way through a double, so a number that is within a bound as written is within it as read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from sgray.text.grammar import characters
from sgray.text.grammar.automata import Automaton, Length, Machine, Multiple, Pattern, automaton
from sgray.text.grammar.expressions import EMPTY, NEVER, Char, Expression, Repeat, Text, choice, optional, sequence
from sgray.text.grammar.json_grammar import MAX_DIGITS

MAX_SIGNIFICANT = 15
_MULTIPLE_DIGITS = 10

_DIGIT = Char(characters.DIGITS)
_NOT_ZERO = Char(characters.of("123456789"))
_DIGITS = Repeat(_DIGIT, 0, None)
_FRACTION = optional(sequence(Text("."), _DIGIT, _DIGITS))
_WHOLE = choice((Text("0"), sequence(_NOT_ZERO, _DIGITS)))


@dataclass(frozen=True)
class Bounds:
    """From `low` to `high`, without them where they are `open`; None is no bound."""

    low: Fraction | None = None
    high: Fraction | None = None
    is_low_open: bool = False
    is_high_open: bool = False

    @property
    def is_free(self) -> bool:
        """Whether there are no bounds."""
        return self.low is None and self.high is None

    def with_low(self, value: float, *, is_open: bool) -> Bounds:
        """The stricter of the lower bounds."""
        low = Fraction(repr(value))
        if self.low is not None and (low, is_open) <= (self.low, self.is_low_open):
            return self
        return Bounds(low, self.high, is_open, self.is_high_open)

    def with_high(self, value: float, *, is_open: bool) -> Bounds:
        """The stricter of the upper bounds."""
        high = Fraction(repr(value))
        if self.high is not None and (-high, is_open) <= (-self.high, self.is_high_open):
            return self
        return Bounds(self.low, high, self.is_low_open, is_open)

    def integers(self) -> tuple[int | None, int | None]:
        """The least and the greatest integer within."""
        low = high = None
        if self.low is not None:
            low = -((-self.low) // 1)
            low += self.is_low_open and low == self.low
        if self.high is not None:
            high = self.high // 1
            high -= self.is_high_open and high == self.high
        return low, high

    def excludes(self, other: Bounds) -> bool:
        """Whether no number is within both."""
        return self._is_below(other) or other._is_below(self)

    def _is_below(self, other: Bounds) -> bool:
        if self.high is None or other.low is None:
            return False
        return self.high < other.low or (self.high == other.low and (self.is_high_open or other.is_low_open))


def integers(low: int | None, high: int | None, digits: int = MAX_DIGITS) -> Expression:
    """The integers from `low` to `high`; without a bound, as far as `digits` digits or those of the other go."""
    most = 10 ** max(digits, len(str(abs(low or 0))), len(str(abs(high or 0)))) - 1
    low, high = -most if low is None else low, most if high is None else high
    options: list[Expression] = []
    if low < 0:
        options.append(sequence(Text("-"), _naturals(max(1, -high), -low)))
    if high >= 0:
        options.append(_naturals(max(0, low), high))
    return choice(options)


def common_multiple(first: int, second: int) -> int:
    """The least number that both divide."""
    return math.lcm(first, second)


def multiples(low: int | None, high: int | None, divisor: int) -> Automaton:
    """The integers from `low` to `high` that `divisor` divides."""
    tree = integers(low, high, _MULTIPLE_DIGITS)
    return automaton([Pattern(tree, is_search=False), Multiple(divisor)])


def numbers(bounds: Bounds) -> Automaton:
    """The numbers within bounds."""
    machines: list[Machine] = []
    if bounds.low is not None:
        machines.append(Pattern(_from(bounds.low, is_open=bounds.is_low_open), is_search=False))
    if bounds.high is not None:
        machines.append(Pattern(_up_to(bounds.high, is_open=bounds.is_high_open), is_search=False))
    digits = Repeat(choice((_DIGIT, Text("."))), 1, None)
    plain = sequence(optional(Text("-")), digits)
    longest = max((len(str(abs(int(bound)))) for bound in (bounds.low, bounds.high) if bound is not None), default=0)
    return automaton([*machines, Pattern(plain, is_search=False), Length(1, max(MAX_SIGNIFICANT, longest) + 1)])


def _naturals(low: int, high: int) -> Expression:
    """The integers from `low` to `high`, neither below 0."""
    if low > high:
        return NEVER
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        options.append(_same_length(str(first), str(min(high, 10**length - 1))))
    return choice(options)


def _same_length(low: str, high: str) -> Expression:
    """Digits between two numbers of as many digits."""
    if not low:
        return EMPTY
    if low == "0" * len(low) and high == "9" * len(high):
        return Repeat(_DIGIT, len(low), len(low)) if len(low) > 1 else _DIGIT
    first, last = low[0], high[0]
    if first == last:
        return sequence(Text(first), _same_length(low[1:], high[1:]))
    rest, options = len(low) - 1, [sequence(Text(first), _same_length(low[1:], "9" * (len(low) - 1)))]
    if int(last) - int(first) > 1:
        inner = "".join(str(digit) for digit in range(int(first) + 1, int(last)))
        options.append(sequence(Char(characters.of(inner)), _same_length("0" * rest, "9" * rest)))
    options.append(sequence(Text(last), _same_length("0" * rest, high[1:])))
    return choice(options)


def _from(bound: Fraction, *, is_open: bool) -> Expression:
    """The numbers from `bound` on."""
    if bound < 0:
        return choice((_WHOLE_NUMBERS, sequence(Text("-"), _positive_up_to(-bound, is_open=is_open))))
    return _positive_from(bound, is_open=is_open)


def _up_to(bound: Fraction, *, is_open: bool) -> Expression:
    """The numbers up to `bound`."""
    if bound < 0:
        return sequence(Text("-"), _positive_from(-bound, is_open=is_open))
    below = sequence(Text("-"), _positive_from(Fraction(0), is_open=True))
    return choice((below, _up_to_from_zero(bound, is_open=is_open)))


def _positive_up_to(bound: Fraction, *, is_open: bool) -> Expression:
    """The numbers above 0 up to `bound`; 0 itself has no sign."""
    whole, digits = _split(bound)
    options = [sequence(Text("0"), _fraction_from("", is_open=True))] if whole > 0 else []
    if whole == 0:
        # both bounds are behind the point
        return sequence(Text("0"), _fraction_between_zero(digits, is_open=is_open))
    if whole > 1:
        options.append(sequence(_naturals(1, whole - 1), _FRACTION))
    options.append(sequence(Text(str(whole)), _fraction_up_to(digits, is_open=is_open)))
    return choice(options)


def _up_to_from_zero(bound: Fraction, *, is_open: bool) -> Expression:
    """The numbers from 0 to `bound`."""
    whole, digits = _split(bound)
    options = [sequence(_naturals(0, whole - 1), _FRACTION)] if whole else []
    return choice([*options, sequence(Text(str(whole)), _fraction_up_to(digits, is_open=is_open))])


def _positive_from(bound: Fraction, *, is_open: bool) -> Expression:
    """The numbers from `bound` on, which is not below 0."""
    whole, digits = _split(bound)
    return choice(
        (
            sequence(Text(str(whole)), _fraction_from(digits, is_open=is_open)),
            sequence(_above(whole), _FRACTION),
        )
    )


def _above(whole: int) -> Expression:
    """The integers above `whole`, which is not below 0."""
    text = str(whole)
    same = _naturals(whole + 1, 10 ** len(text) - 1)
    return choice((same, sequence(_NOT_ZERO, Repeat(_DIGIT, len(text), None))))


def _split(bound: Fraction) -> tuple[int, str]:
    """The whole part and the digits behind the point, without zeros at their end."""
    whole, rest = divmod(bound, 1)
    digits = ""
    while rest:  # ends: bounds are decimal
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    return whole, digits


def _fraction_from(digits: str, *, is_open: bool) -> Expression:
    """The point and what may follow it in a number whose fraction is at least 0.`digits`."""
    options: list[Expression] = []
    for at, digit in enumerate(digits):
        if digit != "9":
            options.append(sequence(Text("." + digits[:at]), _more_than(digit), _DIGITS))
    if is_open:
        zeros = Repeat(Text("0"), 0, None)
        options.append(sequence(Text("." + digits), zeros, _NOT_ZERO, _DIGITS))
    elif digits:
        options.append(sequence(Text("." + digits), _DIGITS))
    else:
        options.append(_FRACTION)
    return choice(options)


def _fraction_up_to(digits: str, *, is_open: bool) -> Expression:
    """The same for a fraction that is at most 0.`digits`."""
    options: list[Expression] = []
    for at, digit in enumerate(digits):
        if digit != "0":
            options.append(sequence(Text("." + digits[:at]), _less_than(digit), _DIGITS))
        options.append(Text("." + digits[:at]) if at else EMPTY)
    if not is_open:
        zeros = Repeat(Text("0"), 0, None)
        options.append(sequence(Text("." + digits), zeros) if digits else optional(sequence(Text(".0"), zeros)))
    return choice(options)


def _fraction_between_zero(digits: str, *, is_open: bool) -> Expression:
    """A fraction above 0 that is at most 0.`digits`."""
    options: list[Expression] = []
    zeros, any_zeros = "", Repeat(Text("0"), 0, None)
    for at, digit in enumerate(digits):
        before = digits[:at]
        if before.strip("0"):
            options.append(Text("." + before))
            if digit != "0":
                options.append(sequence(Text("." + before), _less_than(digit), _DIGITS))
            continue
        # nothing but zeros so far, so what is less must still be more than nothing
        if digit != "0":
            options.append(sequence(Text("." + zeros + "0"), any_zeros, _NOT_ZERO, _DIGITS))
            if digit > "1":
                options.append(sequence(Text("." + zeros), Char(characters.of("123456789"[: int(digit) - 1])), _DIGITS))
        zeros += "0"
    if not is_open and digits:
        options.append(sequence(Text("." + digits), any_zeros))
    return choice(options)


def _more_than(digit: str) -> Expression:
    return Char(characters.of("0123456789"[int(digit) + 1 :]))


def _less_than(digit: str) -> Expression:
    return Char(characters.of("0123456789"[: int(digit)]))


_WHOLE_NUMBERS = sequence(_WHOLE, _FRACTION)
