"""Errors of the chat path in the words of another API."""

from __future__ import annotations

import pytest

from sgray.errors import ContextLengthError, InvalidRequestError, SgrayError
from sgray.serve.openai.translation import in_words_of

NAMES = (
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_tokens|max_completion_tokens", "limit"),
    (r"messages", "input"),
    (r"(tools\[\d+\])\.function", r"\1"),
)


def told(error: SgrayError) -> SgrayError:
    with pytest.raises(type(error)) as caught, in_words_of(NAMES):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Invalid value for 'messages[3].content': no.", "Invalid value for 'input[3].content': no."),
        ("Your messages and other messages are long.", "Your messages and other messages are long."),
        ("response_format of type 'x': no.", "text.format of type 'x': no."),
        ("Missing: 'response_format.json_schema.name'.", "Missing: 'text.format.name'."),
        ("at tools[12].function.parameters: no", "at tools[12].parameters: no"),
        ("'tools[0].functional'", "'tools[0].functional'"),
        ("max_tokens and max_completion_tokens disagree", "limit and limit disagree"),
        ("'my_max_tokens' and 'x.messages'", "'my_max_tokens' and 'x.messages'"),
    ],
)
def test_places_are_renamed_and_words_are_not(message, expected):
    assert told(InvalidRequestError(message)).message == expected


def test_the_kind_of_an_error_and_its_code_stay():
    error = told(ContextLengthError("too long", param="messages"))
    assert (error.param, error.code, str(error)) == ("input", "context_length_exceeded", "too long")
    assert told(InvalidRequestError("x", param=None)).param is None


def test_other_errors_pass_as_they_are():
    assert told(SgrayError("'messages'", param="messages")).param == "messages"
