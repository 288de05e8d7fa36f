from __future__ import annotations

import json
import random
import time
import typing
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgray.config import ToolCallParser as ConfiguredName
from sgray.text.tools.calls import CallArguments, CallStart, Content
from sgray.text.tools.parser import TOOL_FORMATS, ToolCallParser

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "near": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
    },
}
TOOLS = {"weather": PLACE, "ping": {}, "calc": {}}
Calls = list[tuple[str, str]]


def wide(name: str) -> str:
    """A special token of DeepSeek."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


def deepseek(*calls: tuple[str, str]) -> str:
    begin, sep, end = wide("tool call begin"), wide("tool sep"), wide("tool call end")
    inner = "\n".join(f"{begin}function{sep}{name}\n```json\n{arguments}\n```{end}" for name, arguments in calls)
    return wide("tool calls begin") + inner + wide("tool calls end")


def deepseek31(*calls: tuple[str, str]) -> str:
    begin, sep, end = wide("tool call begin"), wide("tool sep"), wide("tool call end")
    inner = "".join(f"{begin}{name}{sep}{arguments}{end}" for name, arguments in calls)
    return wide("tool calls begin") + inner + wide("tool calls end")


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def gpt_oss(*calls: tuple[str, str]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    )


def run(family: str, pieces: Iterable[str], tools: dict = TOOLS) -> tuple[str, Calls, bool]:
    """The content, the calls and whether they are whole; each call begins before its arguments and only once."""
    parser = ToolCallParser(TOOL_FORMATS[family], tools)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert parser.num_calls == len(calls)
    return content, calls, parser.are_whole


def in_every_cut(family: str, text: str) -> tuple[str, Calls, bool]:
    """What the text gives, which is the same whole, by character, in fives and for every cut in two."""
    whole = run(family, [text])
    assert run(family, text) == whole
    assert run(family, [text[at : at + 5] for at in range(0, len(text), 5)]) == whole
    for place in range(len(text) + 1):
        assert run(family, [text[:place], text[place:]]) == whole
    return whole


def test_the_configuration_names_the_formats_that_exist() -> None:
    assert set(typing.get_args(ConfiguredName)) == set(TOOL_FORMATS)


def test_pub_077_no_arguments_are_an_empty_object() -> None:
    for text in (hermes(("ping", "{}")), '<tool_call>{"name": "ping"}</tool_call>', hermes(("ping", "null"))):
        assert in_every_cut("hermes", text) == ("", [("ping", "{}")], True)


def test_pub_078_no_bracket_is_lost() -> None:
    text = '<tool_call>{"name": "calc", "arguments": {"numbers": [{"v": 1}, {"v": 2}]}}</tool_call>'
    content, calls, is_whole = in_every_cut("hermes", text)
    assert (content, is_whole) == ("", True)
    assert json.loads(calls[0][1]) == {"numbers": [{"v": 1}, {"v": 2}]}
    for part in (' [{"', "}]}}"):
        before, after = text.split(part)
        assert run("hermes", [before, part, after]) == (content, calls, is_whole)


def test_pub_079_two_calls_in_one_piece_and_in_any_others() -> None:
    text = hermes(("weather", '{"city":"Oslo"}'), ("weather", '{"city":"Lima"}'))
    whole = run("hermes", [text])
    assert whole == ("", [("weather", '{"city":"Oslo"}'), ("weather", '{"city":"Lima"}')], True)
    draw = random.Random(0)
    for _ in range(1000):
        places = sorted(draw.sample(range(len(text)), draw.randint(1, 9)))
        pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
        assert run("hermes", pieces) == whole


def test_pub_080_text_around_a_call_is_content() -> None:
    text = 'Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call> Done.'
    assert in_every_cut("hermes", text) == ("Let me look. Done.", [("weather", '{"city": "Oslo"}')], True)


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("text", ["See <tool", "a < b", "Look: <tool_c", "x [ y", "[TOOL_C", "{", " \n", "<|tool_call"])
def test_pub_081_what_only_looks_like_a_call_is_given_out(family: str, text: str) -> None:
    assert in_every_cut(family, text) == (text, [], True)


def test_pub_081_text_goes_out_as_soon_as_it_can_be_no_call() -> None:
    parser = ToolCallParser(TOOL_FORMATS["hermes"], TOOLS)
    assert parser.push("a <tool") == [Content("a")]
    assert parser.push("box>") == [Content(" <toolbox>")]


def test_arguments_go_out_while_they_come() -> None:
    parser = ToolCallParser(TOOL_FORMATS["hermes"], TOOLS)
    assert parser.push('<tool_call>{"name": "calc", "arguments": ') == []
    assert parser.push('{"a"') == [CallStart(0, "calc"), CallArguments(0, '{"a"')]
    assert parser.push(": 1") == [CallArguments(0, ": 1")]
    assert parser.push("}}</tool_call>") == [CallArguments(0, "}")]


OSLO = ("weather", '{"city": "Oslo"}')
SEVERAL = [OSLO, ("ping", "{}"), ("calc", '{"a": [1, {"b": "}]\\"<"}]}')]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", hermes(*SEVERAL)),
        ("qwen25", "\n" + hermes(*SEVERAL) + "\n"),
        ("llama3", "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in SEVERAL)),
        (
            "llama3",
            "<|python_tag|>" + ";".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in SEVERAL),
        ),
        ("mistral", "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {t}}}' for n, t in SEVERAL) + "]"),
        ("mistral", "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in SEVERAL)),
        ("deepseekv3", deepseek(*SEVERAL)),
        ("deepseekv31", deepseek31(*SEVERAL)),
        ("kimi_k2", kimi(*SEVERAL)),
        ("gpt-oss", gpt_oss(*SEVERAL)),
        ("gpt-oss", gpt_oss(*SEVERAL).removeprefix("<|start|>assistant").removesuffix("<|call|>")),
    ],
)
def test_each_family_of_json_gives_its_calls_word_for_word(family: str, text: str) -> None:
    assert in_every_cut(family, text) == ("", SEVERAL, True)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("pythonic", '[weather(city="Oslo", days=3), ping()]'),
        ("pythonic", '<|python_start|>[weather(city="Oslo", days=3), ping()]<|python_end|>'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        ),
        (
            "qwen3_coder",
            "<function=weather>\n<parameter=city>Oslo</parameter><parameter=days>3</parameter></function>"
            "<function=ping></function>",
        ),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>ping\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
            "<arg_value>3</arg_value></tool_call><tool_call>ping</tool_call>",
        ),
    ],
)
def test_each_other_family_gives_its_calls_as_json(family: str, text: str) -> None:
    assert in_every_cut(family, text) == ("", [("weather", '{"city": "Oslo", "days": 3}'), ("ping", "{}")], True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("five", "five"),
        ('{"a": [1]}', {"a": [1]}),
        ("null", None),
        ("NaN", "NaN"),
        ('he said "hi"\n  twice', 'he said "hi"\n  twice'),
        ("\n\nlines\n\n", "\nlines\n"),
    ],
)
def test_a_value_without_a_declared_type_is_json_if_it_can_be(text: str, value: object) -> None:
    text = text if text.startswith("\n") else f"\n{text}\n"
    call = f"<tool_call>\n<function=calc>\n<parameter=x>{text}</parameter>\n</function>\n</tool_call>"
    content, calls, is_whole = in_every_cut("qwen3_coder", call)
    assert (content, is_whole, json.loads(calls[0][1])) == ("", True, {"x": value})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("city", '"quoted"', '"quoted"'),
        ("days", "5", 5),
        ("days", "five", "five"),
        ("near", "[1, 2]", [1, 2]),
        ("near", "null", None),
        ("unit", "C", "C"),
    ],
)
def test_the_schema_tells_strings_from_other_values(key: str, text: str, value: object) -> None:
    call = f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert json.loads(in_every_cut("glm45", call)[1][0][1]) == {key: value}


@pytest.mark.parametrize(
    ("family", "call_of"),
    [
        ("hermes", hermes),
        ("deepseekv3", deepseek),
        ("deepseekv31", deepseek31),
        ("kimi_k2", kimi),
        ("gpt-oss", gpt_oss),
        ("mistral", lambda *calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)),
    ],
)
def test_a_call_of_an_unknown_tool_stays_content_and_its_siblings_are_calls(family: str, call_of) -> None:
    content, calls, is_whole = in_every_cut(family, call_of(OSLO, ("nothing", '{"a": 1}'), OSLO))
    assert (calls, is_whole) == ([OSLO, OSLO], True)
    assert "nothing" in content and '{"a": 1}' in content and "Oslo" not in content
    text = call_of(("nothing", '{"a": 1}'))
    assert in_every_cut(family, text) == (text, [], True)


def test_an_unknown_tool_in_an_array_stays_content() -> None:
    bad, good = '{"name": "nothing", "arguments": {}}', '{"name": "ping", "arguments": {}}'
    assert in_every_cut("mistral", f"[TOOL_CALLS] [{good}, {bad}, {good}]") == (bad, [("ping", "{}")] * 2, True)
    text = f"[TOOL_CALLS] [{bad}]"
    assert in_every_cut("mistral", text) == (text, [], True)
    assert in_every_cut("pythonic", "[nothing(a=1), ping()]") == ("nothing(a=1)", [("ping", "{}")], True)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>ping</tool_call>"),
        ("hermes", '<tool_call>{"name": "ping", "argum'),
        ("hermes", "<tool_call><tool_call>"),
        ("llama3", '{"answer": 42}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", 'The call is {"name": "ping", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] ping"),
        ("mistral", "[TOOL_CALLS]" + "x" * 300 + "[ARGS]{}"),
        ("pythonic", "see [1], [ping] and [nothing(1)]"),
        ("pythonic", "[ping(1)]"),
        ("pythonic", "[ping(a=b)]"),
        ("pythonic", "[ping(**{'a': 1})]"),
        ("pythonic", "[ping(a=1e999)]"),
        ("pythonic", "[ping(a={1, 2})]"),
        ("pythonic", "[ping("),
        ("pythonic", "[ping()" + "(" * 300 + ")" * 300 + "]"),
        ("qwen3_coder", "<tool_call>\n<function=nothing>\n</function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'),
        ("glm45", "<tool_call>nothing</tool_call>"),
        ("kimi_k2", "<|tool_call_begin|>ping<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("deepseekv31", f"{wide('tool call begin')}ping{wide('tool sep')}5{wide('tool call end')}"),
        ("gpt-oss", "<|channel|>commentary to=functions.ping<|message|>5<|call|>"),
        ("gpt-oss", "<|channel|>commentary<|message|>to=functions.ping {}<|end|>"),
        ("gpt-oss", "<|channel|>analysis to=ping<|message|>{}<|end|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.ping " + "x" * 600 + "<|message|>{}"),
        ("gpt-oss", "<|channel|>commentary to=functions.ping"),
        ("gpt-oss", "to=functions.nothing<|channel|>commentary<|message|>{}<|call|>"),
    ],
)
def test_what_is_no_valid_call_stays_content(family: str, text: str) -> None:
    assert in_every_cut(family, text) == (text, [], True)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": 1}, "name": "calc"}</tool_call>',
        '<tool_call>{"name": "calc", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "calc", "parameters": {"a": 1}, "id": "x"}</tool_call>',
        '<tool_call>[{"name": "calc", "arguments": {"a": 1}}]</tool_call>',
        '<tool_call>{"name": "calc", "arguments": {"a": 1}}}</tool_call>',
        '<tool_call>{"name": "calc", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "calc", "arguments": {"a": 1}}',
    ],
)
def test_small_slips_of_a_model_still_make_a_call(text: str) -> None:
    content, calls, is_whole = in_every_cut("hermes", text)
    assert (content, is_whole, calls[0][0], json.loads(calls[0][1])) == ("", True, "calc", {"a": 1})


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": "on', '{"a": "on'),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {\'a\': 1}}</tool_call>', "{'a': 1}}"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": [1}}</tool_call>', '{"a": [1}}'),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}'),
        ("kimi_k2", kimi(("calc", '{"a": <x>}')), '{"a": <x>}'),
        ("llama3", '{"name": "calc", "parameters": {"a": 1', '{"a": 1'),
        ("qwen3_coder", "<tool_call>\n<function=calc>\n<parameter=a>on", '{"a": "on'),
        ("glm45", "<tool_call>calc\n<arg_key>a</arg", "{"),
        ("gpt-oss", gpt_oss(("calc", '{"a": <x>}')), '{"a": <x>}'),
        ("gpt-oss", gpt_oss(("calc", '{"a": "on')).removesuffix("<|call|>"), '{"a": "on'),
    ],
)
def test_pub_084_arguments_that_break_off_are_no_whole_call(family: str, text: str, arguments: str) -> None:
    content, calls, is_whole = in_every_cut(family, text)
    assert (calls, is_whole) == ([("calc", arguments)], False)
    assert "calc" not in content


def test_tags_inside_strings_end_no_call() -> None:
    arguments = '{"a": "</tool_call><tool_call>{\\"name\\": \\"ping\\"}"}'
    assert in_every_cut("hermes", hermes(("calc", arguments))) == ("", [("calc", arguments)], True)


@pytest.mark.parametrize(
    "text",
    [
        ' to=functions.calc<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|start|>assistant to=functions.calc<|channel|>commentary <|constrain|>json<|message|> {"a": 1}',
        '<|channel|>commentary to=calc<|message|>{"a": 1}<|return|>',
        '<|channel|>analysis to=functions.calc code<|message|>{"a": 1}<|end|>',
        '<|channel|>commentary<|channel|>commentary to=functions.calc<|message|>{"a": 1}<|end|>',
    ],
)
def test_gpt_oss_names_the_tool_anywhere_in_the_header(text: str) -> None:
    assert in_every_cut("gpt-oss", text) == ("", [("calc", '{"a": 1}')], True)


def test_gpt_oss_may_leave_out_empty_arguments() -> None:
    text = "<|channel|>commentary to=functions.ping<|message|>"
    for end in ("", "<|call|>", "\n<|call|>"):
        assert in_every_cut("gpt-oss", text + end) == ("", [("ping", "{}")], True)


def test_kimi_gives_its_own_ids() -> None:
    parser = ToolCallParser(TOOL_FORMATS["kimi_k2"], TOOLS)
    starts = [event for event in parser.push(kimi(*SEVERAL)) if isinstance(event, CallStart)]
    assert [start.id for start in starts] == ["functions.weather:0", "functions.ping:1", "functions.calc:2"]


def test_a_long_call_takes_time_in_proportion() -> None:
    arguments = json.dumps({"code": "x = 1\n" * 20_000})
    text = hermes(("calc", arguments))
    begin = time.perf_counter()
    assert run("hermes", [text[at : at + 4] for at in range(0, len(text), 4)])[1] == [("calc", arguments)]
    assert time.perf_counter() - begin < 10


PARTS = [
    *("<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", "</parameter>", "</function>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "functions.", ":0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "function", "```json", "```"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "to=", "commentary to=functions.ping<|message|>"),
    *map(wide, ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")),
    *(
        '{"name": "',
        '", "arguments": ',
        '{"name": "calc", "arguments": {',
        "calc",
        "ping",
        "nothing",
        "}",
        "{",
        "[",
        "]",
    ),
    *('"', "\\", ",", ";", ":", "(", ")", "a=", '"a": 1', "1", "'", " ", "\n", "<", "界"),
]


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """A family, a text of its own words and others', and the same text in pieces."""
    family = draw(st.sampled_from(sorted(TOOL_FORMATS)))
    sound = {
        "hermes": hermes(OSLO),
        "kimi_k2": kimi(OSLO),
        "gpt-oss": gpt_oss(OSLO),
        "deepseekv3": deepseek(OSLO),
        "deepseekv31": deepseek31(OSLO),
        "pythonic": "[ping(), nothing()]",
        "mistral": "[TOOL_CALLS]ping[ARGS]{}",
    }
    part = st.sampled_from(PARTS) | st.just(sound.get(family, '{"name": "ping", "parameters": {}}'))
    text = "".join(draw(st.lists(part, max_size=14)))
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return family, text, [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=500)
@given(texts())
def test_no_cut_changes_content_or_calls(drawn: tuple[str, str, list[str]]) -> None:
    family, text, pieces = drawn
    whole = run(family, [text])
    assert run(family, pieces) == run(family, text) == whole
    for _, arguments in whole[1] if whole[2] else ():
        assert isinstance(json.loads(arguments), dict)


@settings(max_examples=300)
@given(texts())
def test_without_a_known_tool_every_text_is_content(drawn: tuple[str, str, list[str]]) -> None:
    family, text, pieces = drawn
    assert run(family, pieces, tools={}) == (text, [], True)
