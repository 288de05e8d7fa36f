"""Regular expressions as grammars of whole texts."""

from __future__ import annotations

import re

import pytest

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.regex import read_regex
from tests.support.grammar_texts import Compiled


@pytest.mark.parametrize(
    ("pattern", "place", "word"),
    [
        ("a(", "position 1", "never closed"),
        ("[z-a]", "position 1", "wrong order"),
        ("*x", "position 0", "nothing to repeat"),
        ("(?P<n>a", "position 0", "never closed"),
        ("a{3,1}", "position 1", "lower bound 3"),
        ("a)", "position 1", "unmatched"),
        ("a\\", "position 1", "nothing stands behind"),
        ("[a", "position 0", "never closed"),
        ("x**", "position 2", "repeats of repeats"),
        ("\\q", "position 0", "not known"),
    ],
)
def test_pub_025_a_broken_pattern_is_refused_with_its_place(pattern, place, word):
    with pytest.raises(GrammarFault, match=re.escape(word)) as caught:
        read_regex(pattern)
    assert caught.value.place.startswith(place)


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(?=foo)foo", "look-around"),
        ("a(?!b).", "look-around"),
        ("(?<=x)y", "look-around"),
        ("(?<!x)y", "look-around"),
        ("(a)\\1", "back-references"),
        ("(?P<n>a)(?P=n)", "back-references"),
        ("(?<n>a)\\k<n>", "back-references"),
        ("\\bfoo", "word boundaries"),
        ("(?i)a", "flags"),
        ("(?>a)", "atomic"),
        ("\\p{L}", "Unicode classes"),
        ("[[:alpha:]]", "POSIX"),
        ("\\Aa", "anchors"),
        ("[]", "empty class"),
        ("\\x4", "hexadecimal"),
        ("\\ud800", "surrogate"),
    ],
)
def test_pub_027_what_is_not_regular_or_not_clear_is_refused(pattern, word):
    with pytest.raises(GrammarFault, match=word):
        read_regex(pattern)


@pytest.mark.parametrize(
    "pattern", ["((a{1,99}){1,99}){1,99}", "(a|b|ab)*c{1,20000}", "a" * 30000, "(" * 90 + ")" * 90]
)
def test_pub_030_a_pattern_that_explodes_is_refused(pattern):
    with pytest.raises(GrammarFault, match=r"at most|more than"):
        read_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("", [""], ["a"]),
        ("(ab|x|)-(|z)[0-9]", ["-0", "ab-7", "x-z3", "-z9"], ["abx-1", "x-zz1", "x-"]),
        ('\\["(苹果|橙子|葡萄|🦤)"\\]', ['["苹果"]', '["🦤"]'], ['["x"]', "苹果"]),
        ("(x+x+)+y", ["xxy", "xxxxxxxy"], ["xy", "xx"]),
        ("^(a|^b|c$)$", ["a", "b", "c"], ["ab", ""]),
        ("(^a|b)c", ["ac", "bc"], ["c", "abc"]),
        ("^abc", ["abc"], ["abcd"]),
        ("{x}a{b}", ["{x}a{b}"], ["xab"]),
        ("[\\w.-]+@\\d{1,3}?", ["a.b-c@12"], ["@1", "a@1234"]),
        ("[^\\d\\s]+", ["abc", "é🦤"], ["1", " ", "٣"]),
        ("a.c", ["abc", "a🦤c"], ["a\nc", "ac"]),
        ("[\\s\\S]{2}", ["\n ", "éa"], ["a"]),
        ("\\u0041\\x42\\t[\\b]", ["AB\t\b"], ["AB"]),
        ("(?:a|b){2,}", ["ab", "bbb"], ["a"]),
        ("(?P<year>\\d{4})-(?<month>\\d\\d)", ["2024-01"], ["2024-1"]),
        ("a*?b+?c??", ["b", "aabbc"], ["a"]),
        ("[a\\]^-]+", ["a]^-"], ["b"]),
    ],
)
def test_pub_026_pub_028_and_pub_029_a_pattern_is_matched_by_the_whole_text(pattern, good, bad):
    assert Compiled(read_regex(pattern)).wrong(good, bad) == []


def test_a_pattern_that_nothing_matches_is_refused():
    with pytest.raises(GrammarFault, match="no text"):
        read_regex("a^b")
