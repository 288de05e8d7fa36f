"""Calls of given tools as grammars: what a model writes in a notation when it is held to the tools' schemas.

A grammar takes in one spelling of each notation, the one that its models are taught, and what it takes in the parser of
the notation reads back as calls with arguments that meet their schemas. Knows neither tokens nor requests.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgray.text.channels import BODY, FUNCTIONS
from sgray.text.grammar import characters
from sgray.text.grammar.automata import Machine, Pattern, Without, automaton
from sgray.text.grammar.expressions import EMPTY, NEVER, Char, Expression, Repeat, Text, choice, optional, sequence
from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.json_grammar import Json, spelled
from sgray.text.grammar.regex import automaton_expression
from sgray.text.grammar.rules import Rules
from sgray.text.grammar.schema.branches import TYPES, Places
from sgray.text.grammar.schema.compiler import SchemaWriter, members_expression, object_expression
from sgray.text.tools.calls import Notation
from sgray.text.tools.channel_calls import ChannelCalls
from sgray.text.tools.json_calls import JsonCalls
from sgray.text.tools.marked_calls import MarkedCalls
from sgray.text.tools.parser import Either
from sgray.text.tools.python_calls import PythonCalls
from sgray.text.tools.tagged_calls import TaggedCalls, kinds_of

MAX_CALLS = 16
"""Calls in one answer, in notations that number them."""

_LINE = optional(Text("\n"))
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called. `is_strict`: its arguments must meet the schema, or there is no grammar.

    Those of others are any object where the schema is one that cannot be held to. `place` names it in faults.
    """

    name: str
    schema: Mapping[str, Any]
    place: str
    is_strict: bool = False


def calls_expression(notation: Notation, tools: Sequence[CallableTool], rules: Rules, *, is_single: bool) -> Expression:
    """One call of the tools, or several. Raises GrammarFault for what a notation or a grammar cannot say."""
    match notation:
        case Either(first, _):
            return calls_expression(first, tools, rules, is_single=is_single)
        case JsonCalls():
            return _json_calls(notation, tools, rules, is_single=is_single)
        case MarkedCalls():
            return _marked_calls(notation, tools, rules, is_single=is_single)
        case PythonCalls():
            return _python_calls(notation, tools, rules, is_single=is_single)
        case TaggedCalls():
            return _tagged_calls(notation, tools, rules, is_single=is_single)
        case ChannelCalls():
            return _channel_calls(tools, rules, is_single=is_single)
    raise GrammarFault("", "calls cannot be held to in this notation")


def free_or_calls(notation: Notation, calls: Expression, rules: Rules) -> Expression:
    """Free text, and calls from where a mark of theirs comes."""
    marks = choice(Text(mark) for mark in notation.marks)
    free = automaton_expression(automaton([Without(Pattern(marks, is_search=True))]), rules)
    if not notation.bare:
        return sequence(free, optional(calls))
    blank = Repeat(Char(characters.BLANKS), 0, None)
    other = Char(characters.complement(characters.union(characters.POSSIBLE_BLANKS, characters.of(notation.bare))))
    bare = sequence(blank, other, Repeat(Char(characters.ALL), 0, None))
    machines: list[Machine] = [Pattern(choice((blank, bare)), is_search=False), Without(Pattern(marks, is_search=True))]
    return choice((automaton_expression(automaton(machines), rules), calls))


def _joined(calls: Sequence[Expression], separator: Expression, rules: Rules, *, is_single: bool) -> Expression:
    call = rules.add(choice(calls), "call")
    return call if is_single else sequence(call, Repeat(rules.add(sequence(separator, call), "call"), 0, None))


def _arguments(tool: CallableTool, json: Json) -> Expression:
    """The arguments of a call as a JSON object."""
    try:
        return object_expression(tool.schema, json)
    except GrammarFault as fault:
        if tool.is_strict:
            raise _at(tool, fault) from None
        return json.any_object()


def _check(tools: Sequence[CallableTool], arguments: Sequence[Expression], rules: Rules) -> None:
    for tool, is_possible in zip(tools, rules.ends(arguments), strict=True):
        if not is_possible:
            raise GrammarFault(tool.place, "no arguments meet this schema")


def _at(tool: CallableTool, fault: GrammarFault) -> GrammarFault:
    return GrammarFault(tool.place, str(fault))


def _json_calls(notation: JsonCalls, tools: Sequence[CallableTool], rules: Rules, *, is_single: bool) -> Expression:
    json = Json(rules)
    key = "parameters" if notation.bare else "arguments"
    arguments = [_arguments(tool, json) for tool in tools]
    _check(tools, arguments, rules)
    calls = [
        sequence(Text(f'{{"name": {spelled(tool.name)}, "{key}": '), one, Text("}"))
        for tool, one in zip(tools, arguments, strict=True)
    ]
    if notation.close:
        mark = sequence(Text(notation.marks[0]), _LINE)
        calls = [sequence(mark, call, _LINE, Text(notation.close)) for call in calls]
        return _joined(calls, _LINE, rules, is_single=is_single)
    if notation.bare:
        joined = _joined(calls, Text("; "), rules, is_single=is_single)
        return sequence(optional(Text(notation.marks[0])), joined)
    inner = _joined(calls, Text(", "), rules, is_single=is_single)
    return sequence(Text(notation.marks[0] + "["), inner, Text("]"))


def _marked_calls(notation: MarkedCalls, tools: Sequence[CallableTool], rules: Rules, *, is_single: bool) -> Expression:
    json = Json(rules)
    fence = (notation.fence[0] + "\n", "\n" + notation.fence[1]) if notation.fence[0] else ("", "")
    separator = Text("\n") if notation.fence[0] else EMPTY
    arguments = [_arguments(tool, json) for tool in tools]
    _check(tools, arguments, rules)
    bodies = [sequence(Text(notation.name_end + fence[0]), one) for one in arguments]
    ends = Text(fence[1] + notation.close)

    def call(index: int) -> Expression:
        written = [
            sequence(Text(notation.open + notation.lead + _marked_name(notation, tool, index)), body, ends)
            for tool, body in zip(tools, bodies, strict=True)
        ]
        return rules.add(choice(written), "call")

    if "id" not in notation.named.groupindex:
        inner = _joined([call(0)], separator, rules, is_single=is_single)
    else:
        inner = call(MAX_CALLS - 1)
        for index in reversed(range(MAX_CALLS - 1)):
            inner = rules.add(sequence(call(index), optional(inner)), "calls")
        inner = call(0) if is_single else inner
    return sequence(Text(notation.section[0]), inner, Text(notation.section[1]))


def _marked_name(notation: MarkedCalls, tool: CallableTool, index: int) -> str:
    text = f"functions.{tool.name}:{index}" if "id" in notation.named.groupindex else tool.name
    match = notation.named.fullmatch(text)
    if match is None or match["name"] != tool.name:
        raise GrammarFault(tool.place, "this name cannot be written in the notation of this model")
    return text


def _channel_calls(tools: Sequence[CallableTool], rules: Rules, *, is_single: bool) -> Expression:
    json = Json(rules)
    arguments = [_arguments(tool, json) for tool in tools]
    _check(tools, arguments, rules)
    calls = [
        sequence(
            Text(f"<|channel|>commentary to={FUNCTIONS}{tool.name} <|constrain|>json{BODY}"), one, Text("<|call|>")
        )
        for tool, one in zip(tools, arguments, strict=True)
    ]
    return _joined(calls, Text("<|start|>assistant"), rules, is_single=is_single)


def _python_calls(notation: PythonCalls, tools: Sequence[CallableTool], rules: Rules, *, is_single: bool) -> Expression:
    json = Json(rules, is_python=True)
    calls = []
    for tool in tools:
        parts = tool.name.split(".")
        if not _DOTTED.fullmatch(tool.name) or any(map(keyword.iskeyword, parts)):
            raise GrammarFault(tool.place, f"a call in Python cannot have the name {tool.name!r}")

        def write(writer: SchemaWriter, name: str, places: Places, place: str = tool.place) -> Expression:
            if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
                raise GrammarFault(place, f"an argument in Python cannot have the name {name!r}")
            return sequence(Text(f"{name}="), writer.value(places))

        calls.append(sequence(Text(tool.name + "("), _members(tool, json, write, Text(", ")), Text(")")))
    return sequence(Text("["), _joined(calls, Text(", "), rules, is_single=is_single), Text("]"))


def _tagged_calls(notation: TaggedCalls, tools: Sequence[CallableTool], rules: Rules, *, is_single: bool) -> Expression:
    json = Json(rules, avoid=notation.value_close[0])
    calls = []
    for tool in tools:

        def write(writer: SchemaWriter, name: str, places: Places, tool: CallableTool = tool) -> Expression:
            return _tagged_argument(notation, tool, name, places, writer)

        members = _members(tool, json, write, EMPTY)
        begin = notation.open + ("\n" if notation.name_open else "") + notation.name_open
        begin += tool.name + notation.name_ends[0] + ("\n" if notation.name_open else "")
        ends = (notation.end + "\n" if notation.end else "") + notation.close
        calls.append(sequence(Text(begin), members, Text(ends)))
    return _joined(calls, Text("\n"), rules, is_single=is_single)


def _members(tool: CallableTool, json: Json, write: Any, comma: Expression) -> Expression:
    try:
        members = members_expression(tool.schema, json, write, comma)
    except GrammarFault as fault:
        raise fault if fault.place == tool.place else _at(tool, fault) from None
    _check([tool], [members], json.rules)
    return members


def _tagged_argument(
    notation: TaggedCalls, tool: CallableTool, name: str, places: Places, writer: SchemaWriter
) -> Expression:
    if name != name.strip() or not name or notation.key_close in name:
        raise GrammarFault(tool.place, f"an argument cannot have the name {name!r} in the notation of this model")
    line = "\n" if notation.has_own_lines else ""
    key = notation.key_open + name + notation.key_close + ("" if notation.has_own_lines else "\n") + notation.value_open
    value = _tagged_value(notation, kinds_of(tool.schema.get("properties", {}).get(name), tool.schema), places, writer)
    return NEVER if value == NEVER else sequence(Text(key + line), value, Text(line + notation.value_close + "\n"))


def _tagged_value(notation: TaggedCalls, kinds: set[str], places: Places, writer: SchemaWriter) -> Expression:
    """A value as the notation's parser will read it: strings as they are, all others as JSON."""
    null = writer.value_of(places, frozenset(("null",)))
    if "string" in kinds:
        texts = writer.texts(places, notation.value_close)
        if "null" in kinds and null == NEVER:
            raise GrammarFault("", "a text that says null could not be told from null")
        return choice(option for option in (null, texts) if "null" in kinds or option is texts)
    others = TYPES - {"string"} if not kinds or "null" in kinds else TYPES - {"string", "null"}
    return writer.value_of(places, others)
