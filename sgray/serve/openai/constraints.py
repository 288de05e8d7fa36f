"""What the text of an answer must be: read from the fields of a body that say so, and turned into a `Grammar`.

OpenAI's `response_format`; SGLang's `regex`, `ebnf`, `json_schema` and `structural_tag`; vLLM's `guided_*` and
`structured_outputs`. One of them a call, since two promises could not both be kept. All but structural tags come out as
GBNF that was written here, so nothing depends on what an engine reads into a schema or a pattern. Reasoning comes first
and is free: see `Thinking`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sgray.errors import InvalidRequestError
from sgray.protocol import Grammar
from sgray.serve.openai.schemas import Constrained, OpenAIBody
from sgray.serve.openai.tools import ToolUse
from sgray.serve.openai.validate import checked_text, shown, unknown_name, wrong_type, wrong_value
from sgray.text.grammar import characters
from sgray.text.grammar.expressions import Char, Expression, Repeat, Text, choice, optional, sequence
from sgray.text.grammar.faults import GrammarFault
from sgray.text.grammar.free_text import up_to
from sgray.text.grammar.gbnf import gbnf_expression
from sgray.text.grammar.json_grammar import Json
from sgray.text.grammar.regex import regex_expression
from sgray.text.grammar.rules import Rules
from sgray.text.grammar.schema.compiler import schema_expression
from sgray.text.grammar.tags import structural_tag

Write = Callable[[Rules], Expression]
MAX_CHOICES = 10_000
_KINDS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BLANKS = Repeat(Char(characters.of(" \n\r\t")), 0, 4)


@dataclass(frozen=True)
class Constraint:
    """What a field asks for: an expression of the text, or a structural tag. `param` is the field."""

    param: str
    write: Write | None = None
    tag: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Thinking:
    """Reasoning before the answer: it may begin with `begin` or has begun already (None), and ends with `end`.

    `end_tokens`: the end as one token; empty where it is several, which a model may choose in more than one way.
    """

    begin: str | None
    end: str
    end_tokens: tuple[int, ...] = ()


def constraint_of(body: Constrained, prefix: str = "") -> Constraint | None:
    """What the fields of a body ask for; None where they ask for nothing. Raises where they ask for two things."""
    found: list[Constraint] = []
    for name, read in _FIELDS.items():
        value = getattr(body, name, None)
        if value is not None:
            found.append(read(f"{prefix}{name}", value))
    if isinstance(body, OpenAIBody):
        asked = response_format(body.response_format)
        found += [asked] if asked is not None else []
        if body.structured_outputs is not None:
            found.append(_structured_outputs(body.structured_outputs))
    if len(found) > 1:
        both = f"'{found[0].param}' and '{found[1].param}'"
        message = f"{both} both say what the answer must be; only one constraint may be given."
        raise InvalidRequestError(message, param=found[1].param, code="invalid_value")
    return found[0] if found else None


def with_calls(constraint: Constraint | None, tools: ToolUse) -> Constraint | None:
    """The constraint of an answer that may be, or must be, calls of tools.

    Calls that are demanded leave nothing for `response_format` to hold for; where they are not, the answer is either.
    """
    if tools.format is None:
        return constraint
    if tools.is_demanded:
        if constraint is not None and constraint.param != "response_format":
            message = f"'tool_choice' demands a call, so '{constraint.param}' cannot hold; only one may be given."
            raise InvalidRequestError(message, param=constraint.param, code="invalid_value")
        return Constraint("tools", tools.calls)
    if constraint is not None and constraint.write is not None:
        write = constraint.write
        return Constraint(constraint.param, lambda rules: choice((write(rules), tools.calls(rules))))
    return Constraint("tools", tools.free_or_calls) if constraint is None and tools.is_held else constraint


def grammar_of(constraint: Constraint, thinking: Thinking | None = None) -> Grammar:
    """The grammar of a constraint. Raises InvalidRequestError that names the place of what cannot be honoured.

    Takes milliseconds, for large schemas a second: not for the event loop.
    """
    try:
        if constraint.write is None:
            assert constraint.tag is not None, "a constraint is an expression or a tag"
            after = () if thinking is None or thinking.begin is not None else thinking.end_tokens
            return Grammar("structural_tag", json.dumps(structural_tag(constraint.tag)), after)
        return _written(constraint.write, thinking)
    except GrammarFault as fault:
        refuse(constraint.param, fault)


def refuse(param: str, fault: GrammarFault) -> NoReturn:
    """Raise for a fault in what a client sent in `param`."""
    wrong_value(param, param, f"{fault}.")


def response_format(value: object) -> Constraint | None:
    """OpenAI's field; raises for anything badly formed by its place."""
    param = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        wrong_type(param, param, "an object", value)
    if value.get("type") not in _KINDS:
        wrong_value(f"{param}.type", f"{param}.type", f"{shown(value.get('type'))} is not one of {', '.join(_KINDS)}.")
    if value["type"] == "structural_tag":
        return Constraint(param, tag=value)
    if value["type"] == "json_schema":
        schema = _json_schema(value)
        return Constraint(param, lambda rules: schema_expression(schema, Json(rules)))
    if extra := [name for name in value if name != "type"]:
        wrong_value(param, param, f"{shown(extra[0])} does not belong beside type {value['type']!r}.")
    return None if value["type"] == "text" else Constraint(param, lambda rules: Json(rules).any_object())


def _json_schema(value: dict[str, Any]) -> Any:
    """The schema of {"type": "json_schema", "json_schema": {"name", "schema", "strict", "description"}}."""
    param = "response_format.json_schema"
    if "json_schema" not in value:
        misplaced = " Here 'schema' stands beside 'type'." if "schema" in value else ""
        message = f"Missing required parameter: '{param}'. The schema belongs under json_schema.schema.{misplaced}"
        raise InvalidRequestError(message, param=param, code="missing_required_parameter")
    if extra := [name for name in value if name not in ("type", "json_schema")]:
        raise unknown_name("response_format", f"response_format.{extra[0]}", ["type", "json_schema"])
    inner = value["json_schema"]
    if not isinstance(inner, dict):
        wrong_type(param, param, "an object", inner)
    for name in inner:
        if name not in ("name", "schema", "strict", "description"):
            raise unknown_name(param, f"{param}.{name}", ["name", "schema", "strict", "description"])
    if not _SCHEMA_NAME.fullmatch(checked_text(f"{param}.name", f"{param}.name", inner.get("name"))):
        wrong_value(f"{param}.name", f"{param}.name", "a name has 1 to 64 letters, digits, underscores and dashes.")
    if inner.get("description") is not None:
        checked_text(f"{param}.description", f"{param}.description", inner["description"])
    if not isinstance(inner.get("strict"), bool | None):
        wrong_type(f"{param}.strict", f"{param}.strict", "a boolean", inner["strict"])
    if not isinstance(inner.get("schema"), dict):
        wrong_type(f"{param}.schema", f"{param}.schema", "an object (a JSON schema)", inner.get("schema"))
    return inner["schema"]


def _structured_outputs(value: object) -> Constraint:
    """vLLM's newer field: an object with one of its kinds in it."""
    param = "structured_outputs"
    if not isinstance(value, dict):
        wrong_type(param, param, "an object", value)
    given = {name: inner for name, inner in value.items() if inner is not None and inner is not False}
    for name in given:
        if name not in (*_STRUCTURED, "json_object"):
            raise unknown_name(param, f"{param}.{name}", [*_STRUCTURED, "json_object"])
    if len(given) != 1:
        wrong_value(param, param, f"it has one of {', '.join((*_STRUCTURED, 'json_object'))}, and only one.")
    name, inner = next(iter(given.items()))
    if name != "json_object":
        return _STRUCTURED[name](f"{param}.{name}", inner)
    if inner is not True:
        wrong_type(param, f"{param}.json_object", "a boolean", inner)
    return Constraint(f"{param}.json_object", lambda rules: Json(rules).any_object())


def _schema(param: str, value: object) -> Constraint:
    schema = _parsed(param, value)
    return Constraint(param, lambda rules: schema_expression(schema, Json(rules)))


def _regex(param: str, value: object) -> Constraint:
    pattern = checked_text(param, param, value)
    return Constraint(param, lambda rules: regex_expression(pattern, rules))


def _gbnf(param: str, value: object) -> Constraint:
    source = checked_text(param, param, value)
    return Constraint(param, lambda rules: gbnf_expression(source, rules))


def _choice(param: str, value: object) -> Constraint:
    if not isinstance(value, list):
        wrong_type(param, param, "an array of strings", value)
    if not 0 < len(value) <= MAX_CHOICES:
        wrong_value(param, param, f"{len(value)} choices, 1 to {MAX_CHOICES} are allowed.")
    texts = [checked_text(param, f"{param}[{index}]", text) for index, text in enumerate(value)]
    return Constraint(param, lambda rules: Json(rules).shared(texts))


def _tag(param: str, value: object) -> Constraint:
    tag = _parsed(param, value)
    if not isinstance(tag, dict):
        wrong_type(param, param, "an object", tag)
    return Constraint(param, tag=tag)


def _parsed(param: str, value: object) -> Any:
    """A JSON value that may have been sent as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        wrong_value(param, param, f"it is not valid JSON: {error}.")


_FIELDS: Mapping[str, Callable[[str, object], Constraint]] = {
    "regex": _regex,
    "ebnf": _gbnf,
    "json_schema": _schema,
    "structural_tag": _tag,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _gbnf,
}
_STRUCTURED: Mapping[str, Callable[[str, object], Constraint]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _gbnf,
    "structural_tag": _tag,
}


def _written(write: Write, thinking: Thinking | None) -> Grammar:
    rules = Rules()
    root = write(rules)
    after: tuple[int, ...] = ()
    if thinking is not None:
        root = sequence(_BLANKS, root)  # they belong to neither side
        if thinking.begin is not None:
            thoughts = sequence(_BLANKS, Text(thinking.begin), up_to(thinking.end, rules))
            root = sequence(optional(thoughts), root)
        elif thinking.end_tokens:
            after = thinking.end_tokens
        else:
            root = sequence(up_to(thinking.end, rules), root)
    source = rules.grammar(root)
    if source is None:
        raise GrammarFault("", "it cannot be satisfied: no text meets it")
    return Grammar("ebnf", source, after)
