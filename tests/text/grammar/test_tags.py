"""Structural tags as clients send them, in both forms."""

from __future__ import annotations

import json

import pytest
import xgrammar

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.tags import structural_tag

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"]}
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
NEW = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}}


def accepts(tag, text: str) -> bool:
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(json.dumps(structural_tag(tag)))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize("tag", [OLD, NEW], ids=["older", "newer"])
def test_free_text_turns_into_what_a_tag_announces(tag):
    assert accepts(tag, 'Well <f>{"a":"\\n\\n"}</f> and <f>{"a":""}</f>!')
    assert accepts(tag, "just text")
    assert not accepts(tag, 'Well <f>{"a":"abc"}</f>')
    assert not accepts(tag, "Well <f>nothing</f>")


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        ({"type": "regex", "pattern": "[ab]{2}"}, "ab", "abc"),
        ({"type": "grammar", "grammar": 'root ::= "\\x41b"'}, "Ab", "\u041ab"),
        ({"type": "const_string", "value": "x"}, "x", "y"),
        ({"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("x", "y")]}, "y", "z"),
        ({"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "x"}}, "xx", "xxx"),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": v} for v in ("x", "y")]}, "xy", "x"),
        ({"type": "tags_with_separator", "separator": ",", "tags": [TAG]}, '<f>{"a":"b"}</f>', "<f></f>"),
    ],
)
def test_formats_inside_of_a_tag_are_kept(content, good, bad):
    tag = {"format": {"type": "tag", "begin": "(", "content": content, "end": ")"}}
    assert accepts(tag, f"({good})")
    assert not accepts(tag, f"({bad})")


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({"type": "other"}, "#/type"),
        ({}, "#"),
        ({"format": {"type": "magic"}}, "#/format"),
        ({"format": {"type": "token", "token": 3}}, "#/format"),
        ({"format": {"type": "const_string"}}, "#/format"),
        ({"format": {"type": "const_string", "value": 3}}, "#/format/value"),
        ({"format": {"type": "const_string", "value": "\ud800"}}, "#/format/value"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "x"}}}, "#/format/json_schema"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "#/format/style"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "#/format/pattern"),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "#/format/max_tokens"),
        ({"format": {"type": "optional", "content": {"type": "star"}}}, "#/format/content"),
        (NEW | {"format": NEW["format"] | {"triggers": ["<g"]}}, "#/format/tags/0/begin"),
        (OLD | {"triggers": [""]}, "#/triggers/0"),
        (OLD | {"structures": [{"begin": "<f>"}]}, "#/structures/0"),
    ],
)
def test_what_is_wrong_with_a_tag_is_named_with_its_place(tag, place):
    with pytest.raises(GrammarFault) as caught:
        structural_tag(tag)
    assert caught.value.place == place
