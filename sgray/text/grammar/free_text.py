"""Text that may be anything but for one mark in it."""

from __future__ import annotations

from sgray.text.grammar.automata import Pattern, Without, automaton
from sgray.text.grammar.expressions import Expression, Text, sequence
from sgray.text.grammar.regex import automaton_expression
from sgray.text.grammar.rules import Rules


def without(mark: str, rules: Rules) -> Expression:
    """Any text in which a mark does not occur."""
    return automaton_expression(automaton([Without(Pattern(Text(mark), is_search=True))]), rules)


def up_to(mark: str, rules: Rules) -> Expression:
    """Any text that ends where a mark first occurs in it."""
    return sequence(without(mark, rules), Text(mark))
