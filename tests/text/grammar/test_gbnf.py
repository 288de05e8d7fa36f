"""Grammars of clients, read and written again."""

from __future__ import annotations

import re

import pytest

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.gbnf import read_gbnf
from tests.support.grammar_texts import Compiled

LIST = """
root ::= "[" item ("," item){1,3} "]"
item ::= "\\"" char{1,5} "\\""
char ::= [^"\\\\\\x7F\\x00-\\x1F]
"""


def test_pub_031_counts_and_codes_are_part_of_the_notation():
    good = ['["ab","c"]', '["a","b","c","d"]']
    assert (
        Compiled(read_gbnf(LIST)).wrong(good, ['["a"]', '["abcdef","x"]', '["a","b","c","d","e"]', '["\x7f","a"]'])
        == []
    )


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= list\nlist ::= list "," item | item\nitem ::= "x"', ["x", "x,x", "x,x,x"], [",x", "x,"]),
        ('root ::= "" | "<" root ">" | root root', ["", "<><>", "<<>>", "<<><>><>"], ["><", "<"]),
        ('root ::= a\na ::= b "x" | "y"\nb ::= a "z" | "w"', ["y", "wx", "yzx"], ["x", "yz"]),
    ],
)
def test_pub_032_left_recursion_works(source, good, bad):
    assert Compiled(read_gbnf(source)).wrong(good, bad) == []


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (
            'root ::= "\\x41bc" [\\x41b-d] # note\n  | other-rule\nother-rule ::= .{2}\n',
            ["AbcA", "Abcc", "éé"],
            ["Abca"],
        ),
        ('root ::= ("a" | "b")* "c"?\n', ["", "abab", "c"], ["cc"]),
        ('root ::= "a"\n  "b" |\n  "c"', ["ab", "c"], ["a"]),
        ('root ::= "\\u00e9" "\\U0001F9A4" "\\n"', ["é🦤\n"], ["e"]),
        ('root ::= "x"{2} "y"{1,} [-a]', ["xxy-", "xxyya"], ["xy-"]),
    ],
)
def test_the_notation_means_what_it_means_in_llama_cpp(source, good, bad):
    assert Compiled(read_gbnf(source)).wrong(good, bad) == []


@pytest.mark.parametrize(
    ("source", "place", "word"),
    [
        ("root ::= u", "line 1, column 10", "'u' is not defined"),
        ('a ::= "x"', "", "no rule called 'root'"),
        ("", "", "no rule called 'root'"),
        ('root ::= "a', "line 1, column 10", "never closed"),
        ('x ::= "a"\nroot ::= ("a"', "line 2, column 10", "never closed"),
        ('root ::= "a"{3,1}', "line 1, column 13", "lower bound"),
        ('root ::= root "a"', "", "ever complete"),
        ('root ::= TagDispatch(("a", b))', "line 1, column 10", "extension"),
        ('start: "x"', "line 1, column 1", "a rule belongs here"),
        ('root ::= "a" (= "b")', "line 1, column 14", "look-ahead"),
        ("root ::= [z-a]", "line 1, column 11", "wrong order"),
        ('root ::= "\\q"', "line 1, column 11", "escape"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "twice"),
        ('root ::= "a"{99999}', "line 1, column 1", "10000"),
        ("root ::= " + "(" * 90 + ")" * 90, "line 1, column 71", "nested"),
    ],
)
def test_pub_030_a_broken_grammar_is_refused_with_its_place(source, place, word):
    with pytest.raises(GrammarFault, match=re.escape(word)) as caught:
        read_gbnf(source)
    assert caught.value.place.startswith(place)
