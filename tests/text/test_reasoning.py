from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgray.config import ReasoningParser as ConfiguredName
from sgray.text.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, goes_on_inside, starts_inside

THINK = REASONING_FORMATS["qwen3"]
FORCED = REASONING_FORMATS["deepseek-r1"]


def split(pieces: typing.Iterable[str], form: ReasoningFormat = THINK, **options: bool | None) -> tuple[str, str]:
    parser = ReasoningParser(form, **options)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


def every_cut_in_two(text: str) -> list[list[str]]:
    return [[text[:place], text[place:]] for place in range(len(text) + 1)] + [list(text)]


def test_the_configuration_names_the_formats_that_exist() -> None:
    assert set(typing.get_args(ConfiguredName)) == set(REASONING_FORMATS)


def test_pub_086_tags_over_several_pieces_are_found() -> None:
    pieces = ["<th", "ink>", "pl", "an</", "thi", "nk>", "ans", "wer"]
    assert split(pieces) == ("plan", "answer")
    for cut in every_cut_in_two("".join(pieces)):
        assert split(cut) == ("plan", "answer")


def test_pub_087_a_text_without_reasoning_is_content_and_goes_out_at_once() -> None:
    parser = ReasoningParser(THINK)
    assert parser.push("<").content == ""
    assert parser.push("my-tag").content == "<my-tag"
    assert parser.push(">x</").content == ">x</"
    assert parser.push("b>").content == "b>"
    assert parser.finish().content == ""


def test_pub_088_half_a_thought_is_reasoning() -> None:
    text = "<think>step one, step tw"
    for cut in every_cut_in_two(text):
        assert split(cut) == ("step one, step tw", "")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", "", ""),
        ("  \n", "", "  \n"),
        ("\n<think>\na \n\n b\n</think>\n\n c \n", "a \n\n b", "c \n"),
        ("<think></think>x", "", "x"),
        ("<think>a</thi", "a</thi", ""),
        ("<thi", "", "<thi"),
        ("<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        ("a<think>b</think>c", "", "a<think>b</think>c"),
        ("a</think>b", "", "a</think>b"),
        ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
        ("<think>a\n", "a", ""),
    ],
)
def test_odd_texts_have_a_defined_split(text: str, reasoning: str, content: str) -> None:
    for cut in every_cut_in_two(text):
        assert split(cut) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("a</think>b", "a", "b"), ("<think>a</think>b", "a", "b"), ("\na ", "a", ""), ("", "", "")],
)
def test_a_forced_text_begins_inside_reasoning_without_a_tag(text: str, reasoning: str, content: str) -> None:
    for cut in every_cut_in_two(text):
        assert split(cut, FORCED) == split(cut, THINK, is_inside=True) == (reasoning, content)


def test_a_prompt_that_closed_the_reasoning_leaves_the_whole_text_as_content() -> None:
    for form in (THINK, FORCED):
        assert split([" <think>", "a</think>"], form, is_inside=False) == ("", " <think>a</think>")


def test_other_tags_are_other_tags() -> None:
    assert split("◁think▷a</think>b◁/think▷c", REASONING_FORMATS["kimi"]) == ("a</think>b", "c")


def test_a_tool_call_ends_reasoning_that_kimi_did_not_close() -> None:
    text = "<think>a <|tool_calls_section_begin|>b"
    for cut in every_cut_in_two(text):
        assert split(cut, REASONING_FORMATS["kimi_k2"]) == ("a", "<|tool_calls_section_begin|>b")


def test_reasoning_goes_out_while_it_comes() -> None:
    parser = ReasoningParser(THINK)
    assert parser.push("<think>one").reasoning == "one"
    assert parser.push(" two ").reasoning == " two"
    assert parser.push("three").reasoning == " three"
    assert parser.push("</think>four").content == "four"


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("what is <think>?<|im_end|>\n", None),
    ],
)
def test_the_end_of_the_prompt_tells_whether_the_model_thinks(prompt: str, inside: bool | None) -> None:
    assert starts_inside(THINK, prompt) is inside


@pytest.mark.parametrize(
    ("message", "inside"), [("", None), ("<think>a", True), ("<think>a</think>b", False), ("an answer", False)]
)
def test_a_continued_message_tells_whether_its_rest_is_reasoning(message: str, inside: bool | None) -> None:
    assert goes_on_inside(THINK, message) is inside


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "<|tool_calls_section_begin|>", "界"]),
    max_size=12,
).map("".join)


TAGGED = sorted(name for name, form in REASONING_FORMATS.items() if not form.has_channels)


@given(TEXTS, st.data(), st.sampled_from(TAGGED), st.sampled_from([None, True, False]))
def test_no_cut_changes_the_split_and_nothing_is_lost(
    text: str, data: st.DataObject, name: str, inside: bool | None
) -> None:
    form = REASONING_FORMATS[name]
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = split([text], form, is_inside=inside)
    assert split(pieces, form, is_inside=inside) == split(text, form, is_inside=inside) == whole
    verbatim = split(pieces, form, is_inside=inside, is_verbatim=True)
    assert "".join(verbatim) == text
    assert verbatim[1] == whole[1]
    assert whole[0] in verbatim[0]
