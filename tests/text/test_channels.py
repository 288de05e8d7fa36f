from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgray.text.channels import ChannelParser
from sgray.text.reasoning import REASONING_FORMATS, goes_on_inside, starts_inside
from sgray.text.tools.parser import TOOL_FORMATS, ToolCallParser

CALL = '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"a": 1}<|call|>'


def split(pieces: Iterable[str], **options: bool | None) -> tuple[str, str]:
    parser = ChannelParser(**options)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


def in_every_cut(text: str, **options: bool | None) -> tuple[str, str]:
    """What the text gives, which is the same whole, by character and for every cut in two."""
    whole = split([text], **options)
    assert split(text, **options) == whole
    for place in range(len(text) + 1):
        assert split([text[:place], text[place:]], **options) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (
            "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>",
            "Two.",
            "2",
        ),
        ("<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>2", "Two.", "2"),
        ("<|channel|>final<|message|> 2 \n<|return|>", "", " 2 \n"),
        ("<|start|>assistant<|channel|>final<|message|>2<|return|>", "", "2"),
        ("2 + 2 = 4", "", "2 + 2 = 4"),
        (" \n2", "", " \n2"),
        ("", "", ""),
        ("to be or not", "", "to be or not"),
        ("<|channel|>analysis<|message|>half a though", "half a though", ""),
        ("<|channel|>analysis<|message|>a<|end|>\n<|start|>assistant<|channel|>ana", "a", ""),
        ("<|channel|>", "", ""),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b"),
        ("<|channel|>analysis<|message|>a < b <| c<|end|>d", "a < b <| c", "d"),
        ("<|channel|>final<|end|>a", "", "a"),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
        ("<|channel|>analysis<|message|>a<|end|>" + CALL, "a", CALL),
        (CALL.removesuffix("<|call|>"), "", CALL.removesuffix("<|call|>")),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            "a\nb",
            "Look.\nc",
        ),
    ],
)
def test_each_channel_goes_where_it_belongs(text: str, reasoning: str, content: str) -> None:
    assert in_every_cut(text) == (reasoning, content)
    assert "".join(in_every_cut(text, is_verbatim=True)) == text


def test_a_mark_without_a_header_is_text() -> None:
    text = "<|channel|>" + "x" * 600 + "<|message|>a"
    assert split(text) == split([text]) == ("", text)


def test_a_prompt_may_have_begun_the_message() -> None:
    rest = "a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert in_every_cut(rest, is_inside=True) == ("a", "b")
    assert in_every_cut("b<|return|>", is_inside=False) == ("", "b")
    form = REASONING_FORMATS["gpt-oss"]
    assert starts_inside(form, "<|start|>assistant") is None
    assert starts_inside(form, "<|start|>assistant<|channel|>analysis<|message|>") is True
    assert starts_inside(form, "<|start|>assistant<|channel|>final<|message|>") is False
    assert goes_on_inside(form, "The answer is") is False


def test_text_goes_out_while_it_comes() -> None:
    parser = ChannelParser()
    assert parser.push("<|channel|>analysis<|mess").reasoning == ""
    assert parser.push("age|>one").reasoning == "one"
    assert parser.push(" two <").reasoning == " two "
    assert parser.push("3").reasoning == "<3"
    assert parser.push("<|end|><|start|>assistant<|channel|>final<|message|>four").content == "four"
    assert parser.push(" five").content == " five"


TEXTS = st.lists(
    st.sampled_from(
        [
            *("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary", "<|message|>"),
            *(" to=functions.calc", " to=python", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json", CALL),
            *(
                "<|",
                "|>",
                "<",
                "a",
                " ",
                "\n",
                "{}",
                "界",
                "<|channel|>analysis<|message|>",
                "<|channel|>final<|message|>",
            ),
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300)
@given(TEXTS, st.data(), st.sampled_from([None, True, False]), st.booleans())
def test_no_cut_changes_the_split_and_nothing_is_lost(
    text: str, data: st.DataObject, inside: bool | None, verbatim: bool
) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = split([text], is_inside=inside, is_verbatim=verbatim)
    assert split(pieces, is_inside=inside, is_verbatim=verbatim) == whole
    assert split(text, is_inside=inside, is_verbatim=verbatim) == whole
    if verbatim:
        assert "".join(whole) == text


def test_calls_are_read_out_of_the_content() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>" + CALL
    reasoning, content = split(text)
    parser = ToolCallParser(TOOL_FORMATS["gpt-oss"], {"calc": {}})
    events = parser.push(content) + parser.finish()
    assert reasoning == "a" and [type(event).__name__ for event in events] == ["Content", "CallStart", "CallArguments"]
    assert events[0].text == "b" and events[2].text == '{"a": 1}' and parser.are_whole
