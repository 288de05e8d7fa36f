"""Random schemas: what their grammars accept must meet them, and what meets them in a usual form must be accepted.

The judge is a validator of Draft 2020-12. The first test draws texts from the grammar; the second draws values.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.schema.compiler import compile_schema
from tests.support.grammar_texts import Compiled

NAMES = ["a", "b", "ab", "x_1", 'k"', "é"]
PATTERNS = ["^[a-z]+$", "\\d{2}", "^a|b$", "^x", "[^a-c]", "^(ab)*$", "^.{2,4}$", "^a?b{1,3}$", "\\s", '"', "a.c"]
NUMBERS = [0, 1, -1, 2, 3, 5, 10, -5, 0.5, -0.5, 1.5, 2.25, 100, -7.5, 0.1, 99.99]
VALUES: list[Any] = ["a", "b", "ab", 1, 1.0, 2, True, False, None, [1], {"a": 1}, {"b": []}, 0.5, "é\n"]
FORMATS = ["date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "json-pointer"]


class Schemas:
    """Draws schemas."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def root(self, depth: int) -> dict[str, Any]:
        schema = self.schema(depth)
        schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
        return schema | {"$defs": {"d": self.leaf(), "e": self.schema(1)}}

    def schema(self, depth: int) -> Any:
        if depth <= 0 or self.draw.random() < 0.3:
            return self.leaf()
        kind = self.draw.choice(["object", "object", "array", "anyOf", "oneOf", "allOf"])
        if kind == "object":
            return self.object(depth)
        if kind == "array":
            return self.array(depth)
        mixed: dict[str, Any] = {kind: [self.schema(depth - 1) for _ in range(self.draw.randrange(1, 4))]}
        return mixed | (self.object(depth - 1) if self.draw.random() < 0.4 else {})

    def leaf(self) -> Any:
        kind = self.draw.choice(["string", "number", "integer", "enum", "const", "types", "any", "ref", "string"])
        if kind == "string":
            texts = {"minLength": range(13), "maxLength": range(30), "pattern": PATTERNS, "format": FORMATS}
            return {"type": "string"} | self.some(texts, 0.35)
        if kind in ("number", "integer"):
            bounds = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS)
            return {"type": kind} | self.some(bounds | {"multipleOf": [1, 2, 3, 5]}, 0.3)
        if kind in ("enum", "const"):
            some = self.draw.sample(VALUES, self.draw.randrange(1, 5))
            return {"enum": some} if kind == "enum" else {"const": some[0]}
        if kind == "types":
            return {"type": self.draw.sample(["string", "integer", "null", "boolean"], self.draw.randrange(1, 4))}
        return (
            {"$ref": self.draw.choice(["#/$defs/d", "#/$defs/e", "#"])}
            if kind == "ref"
            else self.draw.choice([True, {}])
        )

    def array(self, depth: int) -> dict[str, Any]:
        parts = {
            "items": [self.schema(depth - 1)],
            "prefixItems": [[self.schema(depth - 1) for _ in range(2)]],
            "minItems": range(4),
            "maxItems": range(5),
            "unevaluatedItems": [False, {"type": "integer"}],
        }
        return {"type": "array"} | self.some(parts, 0.4)

    def object(self, depth: int) -> dict[str, Any]:
        names = self.draw.sample(NAMES, self.draw.randrange(0, 4))
        parts = {
            "properties": [{name: self.schema(depth - 1) for name in names}],
            "required": [names[:1], names, ["a"]],
            "additionalProperties": [False, True, self.leaf()],
            "patternProperties": [{"^x": self.leaf()}, {"^[a-z]+$": self.leaf()}],
            "propertyNames": [{"pattern": "^[a-z_]*$"}, {"maxLength": 2}, {"enum": ["a", "b"]}],
            "minProperties": range(4),
            "maxProperties": range(4),
            "dependentRequired": [{"a": ["b"]}],
            "dependentSchemas": [{"b": {"required": ["ab"]}}],
            "unevaluatedProperties": [False, {"type": "integer"}],
        }
        rare = self.some({name: parts[name] for name in list(parts)[3:]}, 0.1)
        return {"type": "object"} | self.some({name: parts[name] for name in list(parts)[:3]}, 0.6) | rare

    def some(self, parts: dict[str, Any], share: float) -> dict[str, Any]:
        return {name: self.draw.choice(options) for name, options in parts.items() if self.draw.random() < share}

    def value(self, depth: int) -> Any:
        if depth > 0 and self.draw.random() < 0.4:
            if self.draw.random() < 0.5:
                return [self.value(depth - 1) for _ in range(self.draw.randrange(4))]
            return {name: self.value(depth - 1) for name in sorted(self.draw.sample(NAMES, self.draw.randrange(4)))}
        texts = ["", "a", "ab", "x", "12", "a c", 'q"', "é\n", "abcdefghijkl"]
        return self.draw.choice([*texts, 0, 1, 2, 5, -1, 100, 0.5, 1.5, -0.5, True, False, None])


@pytest.mark.parametrize("part", range(6))
def test_what_a_grammar_accepts_meets_the_schema(part):
    num_texts = 0
    for seed in range(part * 40, part * 40 + 40):
        schemas = Schemas(seed)
        schema = schemas.root(3)
        Draft202012Validator.check_schema(schema)
        try:
            compiled = Compiled(compile_schema(schema))
        except GrammarFault:
            continue
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for _ in range(4):
            text = compiled.random_text(schemas.draw, most=300)
            if text is not None:
                assert list(validator.iter_errors(json.loads(text))) == [], (seed, schema, text)
                num_texts += 1
    assert num_texts > 80


PLAIN: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": "[^a-c]"},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 1.5},
    {"type": "integer", "exclusiveMinimum": -1, "maximum": 5},
    {"type": "integer", "multipleOf": 5},
    {"type": ["string", "null"]},
    {"enum": ["a", 1, None, 0.5, [1], {"a": 1}]},
    {"const": "ab"},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string"}, {"type": "array"}]},
    {"allOf": [{"type": "number"}, {"minimum": 1}]},
    {"type": "array", "items": {"type": ["integer", "string"]}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {}},
    {"type": "object", "additionalProperties": {"type": ["integer", "string", "null"]}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    {"type": "object", "required": ["a"], "maxProperties": 2},
    {"type": "object", "propertyNames": {"maxLength": 1}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": True},
    {"type": "object", "minProperties": 1},
    {},
]


@pytest.mark.parametrize("schema", PLAIN, ids=json.dumps)
def test_what_meets_a_schema_is_accepted_in_compact_form(schema):
    compiled, validator = Compiled(compile_schema(schema)), Draft202012Validator(schema)
    schemas, num_valid = Schemas(1), 0
    for _ in range(500):
        value = schemas.value(2)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert compiled.accepts(text) == validator.is_valid(value), text
        num_valid += validator.is_valid(value)
    assert num_valid
