"""A call of another API on the chat path: what goes wrong there is told in the words of the caller's own API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sgray.errors import InvalidRequestError

Names = Sequence[tuple[str, str]]
"""Patterns of chat's places, and what the places are called by the caller. Each finds whole words alone."""

_PLACE = re.compile(r"'[\w.\[\]]+'|(?<![\w.'])\w+(?:_|\[\d)[\w.\[\]]*")  # in quotes, or no word of English


@contextmanager
def in_words_of(names: Names) -> Iterator[None]:
    """Errors from inside name the caller's fields, in `param` and wherever the message names a place."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param is not None:
            error.param = _renamed(error.param, names)
        error.message = _PLACE.sub(lambda place: _renamed(place[0], names), error.message)
        error.args = (error.message,)
        raise


def _renamed(place: str, names: Names) -> str:
    for pattern, name in names:
        place, count = re.subn(rf"(?<![\w.])(?:{pattern})(?!\w)", name, place)
        if count:
            return place
    return place
