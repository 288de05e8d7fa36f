from __future__ import annotations

from collections.abc import Callable

import pytest

from sgray.text.source import ResultT, Source, Waiting, first_mark


def read(pieces: list[str], reader: Callable[[Source], Waiting[ResultT]], *, is_pinned: bool = True) -> ResultT:
    """What a reader makes of a text that comes in pieces and ends."""
    source = Source()
    source.is_pinned = is_pinned
    waiting = reader(source)
    for piece in pieces:
        source.text += piece
        try:
            next(waiting)
        except StopIteration as stop:
            return stop.value
    source.is_ended = True
    with pytest.raises(StopIteration) as stopped:
        next(waiting)
    return stopped.value.value


@pytest.mark.parametrize("pieces", [["abcX"], ["a", "b", "cX"], [*"abcX"]])
def test_a_reader_never_sees_where_pieces_ended(pieces: list[str]) -> None:
    assert read(pieces, lambda source: source.until(("X", "Y"))) == "abc"
    assert read(pieces, lambda source: source.until(("X",), limit=3)) == "abc"
    assert read(pieces, lambda source: source.until(("X",), limit=2)) is None
    assert read(pieces, lambda source: source.until(("Y",))) is None
    assert read(pieces, lambda source: source.accept("abc")) is True
    assert read(pieces, lambda source: source.accept("abd")) is False
    assert read(pieces, lambda source: source.accept("abcXY")) is False


def test_text_without_an_end_is_given_up_as_soon_as_the_limit_is_passed() -> None:
    source = Source()
    source.is_pinned = True
    waiting = source.until(("</end>",), limit=4)
    source.text = "12345678"
    next(waiting)
    source.text += "9</en"
    with pytest.raises(StopIteration):
        next(waiting)
    assert source.position == 0


def test_only_the_beginning_of_a_mark_is_held_back() -> None:
    source, passed = Source(), list[str]()
    waiting = source.pass_until(("<end>", "<|"), passed.append)
    for piece, sent in (("ab<e", "ab"), ("x", "<ex"), ("<", ""), ("<e", "<"), ("nd", "")):
        passed.clear()
        source.text += piece
        next(waiting)
        assert "".join(passed) == sent
    source.text += ">rest"
    with pytest.raises(StopIteration) as stopped:
        next(waiting)
    assert (stopped.value.value, source.text[source.position :]) == ("<end>", "<end>rest")


def test_what_was_read_is_forgotten_unless_the_source_is_pinned() -> None:
    source = Source()
    source.text, source.position = "abc", 2
    source.is_pinned = True
    source.forget()
    assert (source.text, source.position) == ("abc", 2)
    source.is_pinned = False
    source.forget()
    assert (source.text, source.position) == ("c", 0)


def test_the_first_mark_is_the_first_in_the_text() -> None:
    assert first_mark("a<b>[c]", 0, ("[", "<")) == (1, "<")
    assert first_mark("a<b>[c]", 2, ("[", "<")) == (4, "[")
    assert first_mark("abc", 0, ("[",)) == (3, "")
