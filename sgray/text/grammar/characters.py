"""Sets of characters as sorted ranges of code points. Surrogates are no characters and in no set."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]
"""Both ends belong to a range; ranges are sorted and do not touch."""

LAST = sys.maxunicode
ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
NOTHING: Ranges = ()


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The set of all characters in `pairs`, in any order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return _without_surrogates(merged)


def of(text: str) -> Ranges:
    """The characters of a text."""
    return ranges((ord(char), ord(char)) for char in text)


def union(*sets: Ranges) -> Ranges:
    """What is in any of them."""
    return ranges(pair for one in sets for pair in one)


def complement(given: Ranges) -> Ranges:
    """What is not in it."""
    pairs, begin = [], 0
    for low, high in given:
        if low > begin:
            pairs.append((begin, low - 1))
        begin = high + 1
    if begin <= LAST:
        pairs.append((begin, LAST))
    return _without_surrogates(pairs)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    """What is in both."""
    return complement(union(complement(first), complement(second)))


def difference(first: Ranges, second: Ranges) -> Ranges:
    """What is in the first alone."""
    return intersection(first, complement(second))


def contains(given: Ranges, char: str) -> bool:
    """Whether a character is in the set."""
    return any(low <= ord(char) <= high for low, high in given)


def width(given: Ranges) -> int:
    """How many characters are in the set."""
    return sum(high - low + 1 for low, high in given)


@cache
def unicode_digits() -> Ranges:
    """What some notations take for digits beside 0 to 9."""
    return ranges((code, code) for code in range(LAST + 1) if chr(code).isdecimal())


def _without_surrogates(pairs: Iterable[tuple[int, int]]) -> Ranges:
    kept = []
    for low, high in pairs:
        if high < 0xD800 or low > 0xDFFF:
            kept.append((low, high))
            continue
        if low < 0xD800:
            kept.append((low, 0xD7FF))
        if high > 0xDFFF:
            kept.append((0xE000, high))
    return tuple(kept)


DIGITS = of("0123456789")
WORD = ranges([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_COMMON_BLANKS = union(((9, 13), (0x2000, 0x200A)), of("\x20\xa0\u1680\u2028\u2029\u202f\u205f\u3000"))
BLANKS = _COMMON_BLANKS
"""White space by every notation of regular expressions; `POSSIBLE_BLANKS` is white space by any of them."""
POSSIBLE_BLANKS = union(_COMMON_BLANKS, ranges([(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]))
LINE_ENDS = of("\n\r\u2028\u2029")
