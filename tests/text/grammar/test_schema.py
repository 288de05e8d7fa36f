"""Schemas as grammars, by example: what is accepted, what is refused, and what is said about it."""

from __future__ import annotations

import json
import time

import pytest

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.schema.compiler import compile_schema
from tests.support.grammar_texts import Compiled

OPEN: dict = {"type": "object"}


def closed(required: list[str] | None = None, **properties) -> dict:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


CASES = {
    "pub_001_the_root_inside_itself": (
        closed(v={"type": "integer"}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        ['{"v":1,"next":null}', '{"v":1,"next":{"v":2,"next":{"v":3,"next":null}}}'],
        ['{"v":1,"next":3}', '{"v":1,"next":{"v":"2","next":null}}', '{"v":1}'],
    ),
    "pub_002_a_reference_into_properties": (
        closed(low={"type": "integer"}, high={"$ref": "#/properties/low"}),
        ['{"low":1,"high":2}'],
        ['{"low":1,"high":"2"}', '{"low":1,"high":null}'],
    ),
    "pub_003_an_enum_without_type_behind_a_reference": (
        {"$defs": {"Color": {"enum": ["red", "green"]}}, **closed(c={"$ref": "#/$defs/Color"})},
        ['{"c":"red"}', '{"c":"green"}'],
        ['{"c":{"x":1}}', '{"c":"blue"}', '{"c":null}'],
    ),
    "pub_004_any_object": (OPEN, ["{}", '{"a":1,"b":[true,null]}'], ["[]", '"x"', '{"a":}']),
    "pub_005_an_enum_of_mixed_types": (
        {"enum": ["auto", False, 0, None, 1.5, [1], {"k": "v"}]},
        ['"auto"', "false", "0", "null", "1.5", "[1]", '{"k":"v"}'],
        ['"false"', '"0"', "true", "1", '"null"', "[]"],
    ),
    "pub_006_names_are_literal": (
        closed(**{"na(me)+": {"type": "integer"}, 'a"q': {"type": "boolean"}, "ключ": {"type": "null"}}),
        ['{"na(me)+":1,"a\\"q":true,"ключ":null}'],
        ['{"name":1,"a\\"q":true,"ключ":null}', '{"na(me)+":1,"a"q":true,"ключ":null}'],
    ),
    "pub_007_free_strings_follow_the_standard": (
        closed(t={"type": "string"}),
        ['{"t":"a\\tb"}', '{"t":"\\u00e9 \\"q\\" \\\\ \\/"}', '{"t":""}', '{"t":"\\ud83e\\udda4"}'],
        ['{"t":"a\tb"}', '{"t":"a\nb"}', '{"t":"\\x41"}', '{"t":"\\u12"}', '{"t":"\\ud83e"}'],
    ),
    "pub_008_lengths_count_characters": (
        {"type": "string", "maxLength": 3},
        ['"a\\nb"', '"\\"x\\""', '"\\u00e9x"', '"🦤🦤🦤"', '""', '"\\ud83e\\udda4ab"'],
        ['"abcd"', '"\\n\\n\\n\\n"'],
    ),
    "pub_009_a_pattern_with_lengths": (
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
        ['"abc"', '"abcde"'],
        ['"ab"', '"abcdef"', '"ABC"', '"ab1"'],
    ),
    "pub_010_a_pattern_is_searched": (
        closed(s={"type": "string", "pattern": "\\d{3}"}),
        ['{"s":"123"}', '{"s":"a 1234 b"}', '{"s":"\\"007"}'],
        ['{"s":"12"}', '{"s":"1a2b3"}', '{"s":""}'],
    ),
    "pub_011_a_large_bounded_repeat": (
        closed(m={"type": "string", "pattern": "^[^;]{1,200}$"}),
        ['{"m":"' + "a" * count + '"}' for count in (1, 129, 200)],
        ['{"m":"' + "a" * count + '"}' for count in (0, 201)] + ['{"m":";"}'],
    ),
    "pub_012_a_number_above_an_open_bound": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        ["0.1", "0.999", "1", "1.0", "0.0001"],
        ["0", "0.0", "1.5", "-0.1", "2", "5.7", "1.01", "-0"],
    ),
    "pub_013_integers_around_zero": (
        {"type": "integer", "minimum": -5, "maximum": 3},
        ["-5", "-1", "0", "3"],
        ["-6", "4", "-", "01", "-07", "10"],
    ),
    "pub_015_bounds_of_arrays": (
        closed(tags={"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}),
        ['{"tags":["a","b"]}'],
        ['{"tags":[]}', '{"tags":["a"]}', '{"tags":["a","b","c"]}'],
    ),
    "pub_016_patterns_of_names": (
        closed(score={"type": "integer"}) | {"patternProperties": {"^x_": {"type": "boolean"}}},
        ['{"score":5}', '{"score":5,"x_a":true}', '{"score":5,"x_":false,"x_b":true}'],
        ['{"score":"5"}', '{"score":5,"x_a":1}', '{"score":5,"y":true}'],
    ),
    "pub_017_typed_other_members": (
        {
            "type": "object",
            "properties": {"id": {"type": "string"}},
            "required": ["id"],
            "additionalProperties": {"type": "integer"},
        },
        ['{"id":"a"}', '{"id":"a","n":1,"m":-2}', '{"id":"a","idea":1,"i":2}'],
        ['{"id":"a","n":"1"}', '{"n":1}', '{"id":1}', '{"id":"a","id":1}', '{"id":"a","\\u0069d":1}'],
    ),
    "pub_018_commas_between_optional_members": (
        closed(["b"], a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"}),
        ['{"b":1}', '{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}', '{ "b": 1 }', '{\n  "b": 1,\n  "c": 2\n}'],
        ["{}", '{"a":1}', '{,"b":1}', '{"b":1,}', '{"a":1 "b":1}', '{"b":1,  "c":1}'],
    ),
    "pub_020_an_escaped_sign_in_a_pattern": (
        closed(s={"type": "string", "pattern": "^done\\!$"}),
        ['{"s":"done!"}'],
        ['{"s":"done"}', '{"s":"done\\\\!"}', '{"s":"a poem"}'],
    ),
    "one_of_by_a_tag": (
        {"oneOf": [closed(k={"const": "a"}, v={"type": "integer"}), closed(k={"const": "b"}, v={"type": "string"})]},
        ['{"k":"a","v":1}', '{"k":"b","v":"x"}'],
        ['{"k":"a","v":"x"}', '{"k":"c","v":1}'],
    ),
    "one_of_by_what_is_required": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"b":1}'],
    ),
    "one_of_numbers": (
        {"oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 5}]},
        ["2", "5", "-7"],
        ["3", "4"],
    ),
    "all_of_merges_members": (
        {
            "allOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"minimum": 3}, "b": {"type": "null"}}},
            ],
            "type": "object",
        },
        ['{"a":3}', '{"a":9,"b":null}'],
        ['{"a":2}', '{"b":null}'],
    ),
    "unevaluated_members_behind_all_of": (
        {"allOf": [{"properties": {"a": {"type": "null"}}}], "type": "object", "unevaluatedProperties": False},
        ["{}", '{"a":null}'],
        ['{"b":1}'],
    ),
    "dependent_members": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "dependentRequired": {"a": ["b"]},
        },
        ["{}", '{"b":null}', '{"a":null,"b":null}'],
        ['{"a":null}'],
    ),
    "counts_of_members": (
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
        ['{"a":null}', '{"a":null,"b":null}'],
        ["{}", '{"a":null,"b":null,"c":null}'],
    ),
    "names_of_members": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$", "maxLength": 2}},
        ["{}", '{"ab":1}'],
        ['{"abc":1}', '{"d":1}'],
    ),
    "tuples": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
        ["[]", "[1]", '[1,"a"]', '[1,"a",null,null]'],
        ['["a"]', '[1,"a",1]', "[null]"],
    ),
    "different_items_of_an_enum": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        ['["b"]', '["c","a"]', '["a","b","c"]'],
        ["[]", '["a","a"]', '["a","b","a"]'],
    ),
    "multiples": (
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 30},
        ["0", "7", "28"],
        ["1", "8", "35", "-7"],
    ),
    "bounds_below_zero": (
        {"type": "number", "minimum": -2.5, "exclusiveMaximum": -0.25},
        ["-2.5", "-1", "-0.26", "-2.50"],
        ["-0.25", "0", "-2.51", "-3", "1", "-0.2"],
    ),
    "formats": (
        {"type": "string", "format": "date-time"},
        ['"2024-02-28T23:59:59Z"', '"1999-12-31T00:00:00.5+01:00"'],
        ['"2024-02-30T00:00:00Z"', '"2024-13-01T00:00:00Z"', '"2024-01-01 00:00:00"'],
    ),
    "a_long_length_with_escapes": (
        {"type": "string", "minLength": 2, "maxLength": 100},
        ['"' + "a" * 100 + '"', '"say \\"hi\\"\\nand go"', '"ab"'],
        ['"' + "a" * 101 + '"', '"a"', '"' + "\\n" * 101 + '"'],
    ),
    "annotations_say_nothing": (
        {"type": "string", "title": "t", "description": "d", "default": 1, "x-order": 2, "format": "int32"},
        ['"a"'],
        ["1"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_schema_accepts_what_meets_it_and_nothing_else(name):
    schema, good, bad = CASES[name]
    assert Compiled(compile_schema(schema)).wrong(good, bad) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 8},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "string", "minLength": 4, "maxLength": 2},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "pattern": "^a$", "const": "b"},
        closed(next={"$ref": "#"}),
        False,
    ],
)
def test_pub_014_what_nothing_meets_is_said_to_be_so(schema):
    for whole in (schema, closed(x=schema)):
        if "$ref" not in json.dumps(whole) or whole is schema:
            with pytest.raises(GrammarFault, match="cannot be satisfied"):
                compile_schema(whole)


@pytest.mark.parametrize(
    ("schema", "place", "word"),
    [
        ({"type": "objekt"}, "#/type", "objekt"),
        ({"type": "object", "required": "x"}, "#/required", "array of names"),
        ({"properties": []}, "#/properties", "schemas by name"),
        ("not a schema", "#", "object or a boolean"),
        ({"type": "string", "pattern": "a("}, "#/pattern", "never closed"),
        ({"type": "string", "pattern": "(?=a)b"}, "#/pattern", "look-around"),
        (closed(a={"not": {"type": "string"}}), "#/properties/a/not", "'not'"),
        ({"if": {}, "then": {}}, "#/if", "'if'"),
        ({"type": "array", "contains": {}}, "#/contains", "'contains'"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "#/uniqueItems", "uniqueItems"),
        ({"type": "number", "multipleOf": 0.1}, "#/multipleOf", "whole numbers"),
        ({"type": "string", "format": "regex"}, "#/format", "regex"),
        ({"$ref": "https://example.com/a.json"}, "#/$ref", "outside"),
        ({"$ref": "#/$defs/a"}, "#/$ref", "nothing is at"),
        ({"$ref": "#"}, "#", "leads back to itself"),
        ({"minLenght": 1}, "#/minLenght", "minLength"),
        ({"type": "array", "items": [{}]}, "#/items", "schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf/0", "oneOf"),
        ({"type": "integer", "minimum": True}, "#/minimum", "number"),
        ({"type": "string", "maxLength": -1}, "#/maxLength", "whole number"),
        ({"$defs": {"a": {"$dynamicRef": "#x"}}, "$ref": "#/$defs/a"}, "#/$defs/a/$dynamicRef", "$dynamicRef"),
    ],
)
def test_pub_019_what_cannot_be_honoured_is_named_with_its_place(schema, place, word):
    with pytest.raises(GrammarFault) as caught:
        compile_schema(schema)
    assert caught.value.place == place
    assert word in str(caught.value)


def test_pub_024_an_enum_of_thousands_is_small_and_quick():
    schema = {"enum": [f"item-{index:04d}-xxxxxxxxxxxxxxxxxxxx" for index in range(3000)]}
    begin = time.thread_time()
    grammar = compile_schema(schema)
    assert time.thread_time() - begin < 2
    assert len(grammar) < 20_000
    compiled = Compiled(grammar)
    assert (
        compiled.wrong(
            ['"item-0000-xxxxxxxxxxxxxxxxxxxx"', '"item-2999-xxxxxxxxxxxxxxxxxxxx"'],
            ['"item-3000-xxxxxxxxxxxxxxxxxxxx"', '"item-0000"'],
        )
        == []
    )


def test_members_are_declared_or_asked_for():
    assert Compiled(compile_schema({"type": "object", "properties": {"a": {}}})).wrong(['{"a":1}'], ['{"b":1}']) == []
    schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": True}
    assert Compiled(compile_schema(schema)).wrong(['{"a":1,"b":1}', '{"b":[]}'], ['{"b":1,"a":1}']) == []


def test_blanks_are_bounded():
    compiled = Compiled(compile_schema(closed(a={"type": "integer"})))
    deep = "{\n" + " " * 32 + '"a":1}'
    assert (
        compiled.wrong([deep, '{ "a" : 1 }'], ['{  "a":1}', '{\n\n"a":1}', deep.replace("\n", "\n "), ' {"a":1}']) == []
    )


@pytest.mark.parametrize("bounded", [{}, {"maxLength": 80}, {"minLength": 20, "maxLength": 40}])
def test_a_schema_of_64_members_is_written_in_little_time(bounded):
    kinds = [{"type": "string", **bounded}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}]
    schema = {"type": "object", "properties": {f"member_{index}": kinds[index % 3] for index in range(64)}}
    compile_schema(schema)
    begin = time.thread_time()
    compile_schema(schema)
    assert time.thread_time() - begin < 0.5
