"""Which grammar a call carries, and what is said about those that cannot be: on a backend that ignores them."""

from __future__ import annotations

import json

import pytest

from tests.support.grammar_texts import Compiled

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "a+"}, "end": "</f>"}],
    },
}
GOOD, BAD = '{"a":1}', '{"a":"x"}'


def response_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def tool(name: str = "get", schema=SCHEMA, **fields) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


FIELDS = [
    ({"response_format": response_format(SCHEMA)}, GOOD, BAD),
    ({"response_format": {"type": "json_object"}}, BAD, "[]"),
    ({"json_schema": SCHEMA}, GOOD, BAD),
    ({"json_schema": json.dumps(SCHEMA)}, GOOD, BAD),
    ({"guided_json": SCHEMA}, GOOD, BAD),
    ({"regex": "ab?"}, "a", "b"),
    ({"regex": ""}, "", "b"),
    ({"guided_regex": "ab?"}, "ab", "b"),
    ({"ebnf": 'root ::= "x"'}, "x", "y"),
    ({"guided_grammar": 'root ::= "x"'}, "x", "y"),
    ({"guided_choice": ["ja", "nein"]}, "nein", "vielleicht"),
    ({"structured_outputs": {"json": SCHEMA}}, GOOD, BAD),
    ({"structured_outputs": {"regex": "a", "choice": None}}, "a", "b"),
    ({"structured_outputs": {"choice": ["ja"]}}, "ja", "nein"),
    ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "x", "y"),
    ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
]


@BOTH
@pytest.mark.parametrize(("fields", "good", "bad"), FIELDS, ids=lambda value: str(value)[:40])
async def test_a_field_becomes_the_grammar_of_all_choices(api, backend, path, fields, good, bad):
    await api.answer(path, n=2, **fields)
    grammars = [request.grammar for request in backend.requests]
    assert len(grammars) == 2 and grammars[0] == grammars[1]
    assert (grammars[0].kind, grammars[0].after) == ("ebnf", ())
    assert Compiled(grammars[0].source).wrong([good], [bad]) == []


async def test_the_native_form_has_one_grammar_a_prompt(api, backend):
    sampling = [
        {"regex": "a", "max_new_tokens": 2},
        {"max_new_tokens": 2},
        {"ebnf": 'root ::= "b"', "max_new_tokens": 2},
    ]
    await api.answer(NATIVE, text=["x", "y", "z"], sampling_params=sampling)
    kinds = [request.grammar and request.grammar.source for request in backend.requests]
    assert kinds[1] is None and Compiled(kinds[0]).accepts("a") and Compiled(kinds[2]).accepts("b")
    await api.answer(NATIVE, sampling_params={"json_schema": json.dumps(SCHEMA), "max_new_tokens": 2})
    assert Compiled(backend.requests[-1].grammar.source).accepts(GOOD)


@pytest.mark.parametrize("value", [TAG, json.dumps(TAG)])
async def test_structural_tags_stay_what_they_are(api, backend, value):
    await api.answer(CHAT, structural_tag=value)
    assert backend.requests[-1].grammar.kind == "structural_tag"
    await api.answer(NATIVE, sampling_params={"structural_tag": value, "max_new_tokens": 2})
    await api.answer(CHAT, response_format=TAG)
    assert len({request.grammar.source for request in backend.requests}) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a", "response_format": response_format(SCHEMA)},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"guided_json": {}, "guided_regex": "a"},
        {"structured_outputs": {"regex": "a"}, "json_schema": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    ],
)
@BOTH
async def test_pub_033_only_one_constraint_may_be_given(api, path, fields):
    assert "only one" in (await api.refused(path, **fields))["message"]
    assert (await api.post(path)).status_code == 200


async def test_pub_033_only_one_constraint_a_prompt_of_the_native_form(api):
    error = await api.refused(NATIVE, sampling_params={"regex": "a", "json_schema": "{}"})
    assert "only one constraint" in error["message"]


@BOTH
@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "objekt"}, "#/type"),
        ({"type": "object", "required": "x"}, "#/required"),
        ({"properties": []}, "#/properties"),
        ("not a schema", "object"),
        ({"type": "string", "pattern": "a("}, "#/pattern"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "cannot be satisfied"),
        ({"type": "string", "minLength": 4, "maxLength": 2}, "cannot be satisfied"),
        ({"$ref": "#"}, "leads back"),
        ({"const": {"$ref": "#/a"}, "allOf": [{"$ref": "#"}]}, "#"),
        ({"enum": ["\ud800"]}, "surrogate"),
    ],
)
async def test_pub_014_and_pub_019_a_bad_schema_is_refused_by_its_place(api, path, schema, word):
    error = await api.refused(path, response_format=response_format(schema))
    assert error["param"].startswith("response_format")
    assert word in error["message"]
    assert (await api.post(path)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a("}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "(?=a)"}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"ebnf": "root ::= u"}, "ebnf"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"guided_json": {"type": 3}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"structural_tag": {"format": 3}}, "structural_tag"),
        ({"structural_tag": "3"}, "structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": 3}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": 1, "schema": {}}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "x": 1}}},
            "response_format.json_schema",
        ),
    ],
)
async def test_pub_025_and_pub_027_the_field_is_named(api, fields, param):
    assert (await api.refused(CHAT, **fields))["param"] == param


async def test_a_prompt_of_the_native_form_is_named(api):
    error = await api.refused(NATIVE, text=["a", "b"], sampling_params=[{}, {"regex": "("}])
    assert error["param"] == "sampling_params[1].regex"


class TestReasoning:
    """Thoughts come before what a grammar is for."""

    @pytest.fixture
    def make(self, make_app):
        return make_app

    async def test_an_end_of_several_tokens_is_part_of_the_grammar(self, make_app, backend):
        grammar = await _grammar(make_app(reasoning_parser="deepseek-r1"), backend, regex="[0-9]+")
        assert grammar.after == ()
        good = ["one or two</think>42", "</think>\n\n42", "<b></think>4"]
        assert Compiled(grammar.source).wrong(good, ["42", "one</think>x", "a</think>1</think>2"]) == []

    async def test_thoughts_that_may_come_are_optional(self, make_app, backend):
        grammar = await _grammar(make_app(reasoning_parser="qwen3"), backend, regex="[0-9]+")
        assert (
            Compiled(grammar.source).wrong(["42", "<think>\nhm\n</think>\n\n42"], ["<think>42", "hm</think>42"]) == []
        )

    async def test_an_end_of_one_token_is_left_to_the_engine(self, make_app, backend, monkeypatch):
        from sgray.text import reasoning

        form = reasoning.ReasoningFormat("<jupyter_start>", "<jupyter_output>", is_forced=True)
        monkeypatch.setattr("sgray.serve.openai.service.REASONING_FORMATS", {"deepseek-r1": form})
        grammar = await _grammar(make_app(reasoning_parser="deepseek-r1"), backend, regex="[0-9]+")
        assert len(grammar.after) == 1
        assert Compiled(grammar.source).wrong(["42", "\n\n42"], ["hm</think>42"]) == []


async def _grammar(app, backend, **fields):
    import httpx

    from tests.serve.openai.conftest import Api

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        await Api(http).answer(CHAT, **fields)
    return backend.requests[-1].grammar


CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


class TestTools:
    """Calls that are demanded, named, limited and strict; the notation is that of Hermes."""

    async def grammar(self, make_app, backend, **fields) -> Compiled | None:
        found = await _grammar(make_app(tool_call_parser="hermes"), backend, **fields)
        return None if found is None else Compiled(found.source)

    async def test_auto_is_free(self, make_app, backend):
        assert await self.grammar(make_app, backend, tools=[tool()]) is None
        assert await self.grammar(make_app, backend, tools=[tool()], tool_choice="none") is None

    async def test_required_demands_calls_of_any_tool(self, make_app, backend):
        found = await self.grammar(make_app, backend, tools=[tool("a"), tool("b")], tool_choice="required")
        one, two = CALL.format("a", GOOD), CALL.format("b", GOOD)
        assert (
            found.wrong([one, two, f"{one}\n{two}"], ["", "Hello", CALL.format("c", GOOD), CALL.format("a", BAD)]) == []
        )

    async def test_a_named_function_is_called_once(self, make_app, backend):
        choice = {"type": "function", "function": {"name": "b"}}
        found = await self.grammar(make_app, backend, tools=[tool("a"), tool("b")], tool_choice=choice)
        two = CALL.format("b", GOOD)
        assert found.wrong([two], [CALL.format("a", GOOD), f"{two}\n{two}"]) == []

    @pytest.mark.parametrize("mode", ["required", "auto"])
    async def test_allowed_tools_are_the_only_ones(self, make_app, backend, mode):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "b"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        found = await self.grammar(make_app, backend, tools=[tool("a"), tool("b")], tool_choice=choice)
        assert found.wrong([CALL.format("b", GOOD)], [CALL.format("a", GOOD)]) == []
        assert found.accepts("Hello.") == (mode == "auto")

    async def test_a_strict_tool_is_free_up_to_the_call(self, make_app, backend):
        found = await self.grammar(make_app, backend, tools=[tool(strict=True)])
        assert found.wrong(["Hello.", "Well: " + CALL.format("get", GOOD)], ["Well: " + CALL.format("get", BAD)]) == []

    async def test_one_call_is_one(self, make_app, backend):
        for choice in ("auto", "required"):
            fields = {"tools": [tool()], "tool_choice": choice, "parallel_tool_calls": False}
            found = await self.grammar(make_app, backend, **fields)
            one = CALL.format("get", GOOD)
            assert found.wrong([one], [f"{one}\n{one}"]) == []

    async def test_a_response_format_holds_where_no_call_is_made(self, make_app, backend):
        fields = {"tools": [tool("a")], "response_format": {"type": "json_object"}}
        found = await self.grammar(make_app, backend, **fields)
        assert found.wrong(["{}", CALL.format("a", GOOD)], ["Hello", "Hello" + CALL.format("a", GOOD)]) == []
        found = await self.grammar(make_app, backend, **fields, tool_choice="required")
        assert found.wrong([CALL.format("a", GOOD)], ["{}"]) == []

    async def test_pub_085_references_are_those_of_each_tool(self, make_app, backend):
        def listed(kind: str) -> dict:
            items = {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 3}
            return {"type": "object", "properties": {"v": items}, "required": ["v"], "$defs": {"x": {"type": kind}}}

        tools = [tool("a", listed("integer")), tool("b", listed("null"))]
        found = await self.grammar(make_app, backend, tools=tools, tool_choice="required")
        good = [CALL.format("a", '{"v":[1,2,3]}'), CALL.format("b", '{"v":[null]}')]
        bad = [CALL.format("a", '{"v":[null]}'), CALL.format("a", '{"v":[]}'), CALL.format("b", '{"v":[1]}')]
        assert found.wrong(good, bad) == []
        assert await self.grammar(make_app, backend, tools=tools, tool_choice="none") is None

    async def test_a_demanded_call_needs_no_configured_notation(self, api, backend):
        await api.answer(CHAT, tools=[tool("a")], tool_choice="required")
        assert Compiled(backend.requests[-1].grammar.source).accepts(CALL.format("a", GOOD))


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        ("any", "required"),
        ({"type": "custom", "custom": {"name": "get"}}, "required"),
        ({"type": "function", "function": {"name": "x"}}, "no tool is called"),
        ({"type": "function", "function": 3}, "object"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "one tool or more"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [{"name": "get"}]}}, "'auto' or 'required'"),
    ],
)
async def test_a_choice_that_names_nothing_is_refused(api, choice, word):
    error = await api.refused(CHAT, tools=[tool()], tool_choice=choice)
    assert error["param"] == "tool_choice" and word in error["message"]


async def test_a_strict_schema_that_cannot_be_held_to_is_refused(make_app):
    import httpx

    from tests.serve.openai.conftest import Api

    app = make_app(tool_call_parser="hermes")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        error = await Api(http).refused(CHAT, tools=[tool(schema={"not": {}}, strict=True)])
        assert error["param"] == "tools" and "tools[0].function.parameters" in error["message"]
        error = await Api(http).refused(CHAT, tools=[tool()], tool_choice="required", regex="a")
        assert error["param"] == "regex"
