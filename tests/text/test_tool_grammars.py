"""Calls as grammars: whatever they accept, the parser of the notation reads back as calls that meet their schemas."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.rules import Rules
from sgray.text.tools.calls import CallArguments, CallStart, Content
from sgray.text.tools.grammars import CallableTool, calls_expression, free_or_calls
from sgray.text.tools.parser import TOOL_FORMATS, ToolCallParser
from tests.support.grammar_texts import Compiled

SCHEMAS: dict[str, dict] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
            "more": {"type": "object", "properties": {"x": {"type": ["string", "null"]}, "y": {"type": "boolean"}}},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
            "main": {"$ref": "#/$defs/tag"},
        },
        "required": ["city", "days", "tags"],
        "additionalProperties": False,
        "$defs": {"tag": {"enum": ["a<b", "b", "12"]}},
    },
    "ping": {"type": "object", "properties": {}},
    "free": {
        "type": "object",
        "properties": {
            "any": {},
            "text": {"type": "string", "pattern": "^[a-c<]+$"},
            "value": {"type": ["number", "boolean"]},
        },
    },
}
TOOLS = [CallableTool(name, schema, name, is_strict=True) for name, schema in SCHEMAS.items()]
FORMATS = pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in ("qwen", "qwen25")])


def compiled(name: str, tools=TOOLS, *, is_single: bool = False, is_free: bool = False) -> Compiled:
    rules, notation = Rules(), TOOL_FORMATS[name].notation
    calls = calls_expression(notation, tools, rules, is_single=is_single)
    source = rules.grammar(free_or_calls(notation, calls, rules) if is_free else calls)
    assert source is not None
    return Compiled(source)


def read(name: str, text: str) -> tuple[list[tuple[str, str]], str, bool]:
    """The calls in a text, the content, and whether all calls are whole."""
    parser = ToolCallParser(TOOL_FORMATS[name], SCHEMAS)
    calls, content = [], ""
    for event in parser.push(text) + parser.finish():
        match event:
            case Content(more):
                content += more
            case CallStart(_, called):
                calls.append((called, ""))
            case CallArguments(index, more):
                calls[index] = (calls[index][0], calls[index][1] + more)
    return calls, content, parser.are_whole


@FORMATS
@pytest.mark.parametrize("is_single", [False, True])
def test_every_accepted_text_is_calls_that_meet_their_schemas(name, is_single):
    grammar, draw, num_calls, most = compiled(name, is_single=is_single), random.Random(3), 0, 0
    for _ in range(25):
        text = grammar.random_text(draw)
        if text is None:
            continue
        calls, content, are_whole = read(name, text)
        assert calls and are_whole and not content.strip(), text
        for called, arguments in calls:
            assert Draft202012Validator(SCHEMAS[called]).is_valid(json.loads(arguments)), text
        num_calls, most = num_calls + len(calls), max(most, len(calls))
    assert num_calls > 8
    assert most == 1 or not is_single


@FORMATS
def test_free_text_has_no_mark_of_a_call_in_it_but_that_of_good_ones(name):
    grammar, draw = compiled(name, is_free=True), random.Random(4)
    assert grammar.wrong(["", "Hello.", "a < b", "é\n"], []) == []
    notation = TOOL_FORMATS[name].notation
    assert not grammar.accepts(f"See {notation.marks[0]} nothing")
    call = compiled(name).random_text(draw)
    while call is None:
        call = compiled(name).random_text(draw)
    assert grammar.accepts(call)
    assert grammar.accepts(f"Look: {call}") == (not notation.bare)


def test_a_schema_that_cannot_be_held_to_matters_for_strict_tools_alone():
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    with pytest.raises(GrammarFault, match=r"#/properties/a/not") as caught:
        compiled("hermes", [CallableTool("f", schema, "tools[0]", is_strict=True)])
    assert caught.value.place == "tools[0]"
    loose = compiled("hermes", [CallableTool("f", schema, "tools[0]")])
    assert loose.accepts('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("pythonic", CallableTool("a-b", {}, "tools[0]")),
        ("pythonic", CallableTool("f", {"properties": {"class": {}}}, "tools[0]")),
        ("qwen3_coder", CallableTool("f", {"properties": {"a>b": {}}}, "tools[0]")),
        ("hermes", CallableTool("f", {"type": "string"}, "tools[0]", is_strict=True)),
    ],
)
def test_what_a_notation_cannot_say_is_refused(name, tool):
    with pytest.raises(GrammarFault) as caught:
        compiled(name, [tool])
    assert caught.value.place == "tools[0]"
