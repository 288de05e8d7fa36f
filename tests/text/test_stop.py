from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgray.errors import InvalidRequestError
from sgray.text.stop import StopStrings

stops_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is sent piece by piece, the rest last, and the stop that matched."""
    watch = StopStrings(stops, include)
    return [*(watch.push(piece) for piece in pieces), watch.finish()], watch.matched


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first end of any stop; the longest that ends there."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def can_become_a_stop(text: str, stops: list[str]) -> bool:
    return any(stop.startswith(text) for stop in stops)


def test_a_stop_over_two_tokens_is_cut_and_its_start_never_sent_pub_041() -> None:
    sent, matched = run(["DEF", "DEF"], ["EFD"])
    assert sent == ["D", "", ""]
    assert matched == "EFD"


def test_a_stop_inside_one_token_is_found_pub_042() -> None:
    sent, matched = run(["DEF"], ["DE"])
    assert "".join(sent) == ""
    assert matched == "DE"


def test_text_held_as_a_possible_stop_is_sent_at_the_end_pub_043() -> None:
    sent, matched = run(["DEF", "DEF", "DEF"], ["FX"])
    assert sent == ["DE", "FDE", "FDE", "F"]
    assert matched is None


def test_the_stop_can_be_kept_but_not_what_follows_it_pub_044() -> None:
    sent, matched = run(["DEF", "DEF"], ["EFD"], include=True)
    assert "".join(sent) == "DEFD"
    assert matched == "EFD"


def test_a_stop_of_a_wide_character_leaves_no_trace() -> None:
    assert run(["AB", "界", "CD"], ["界"]) == (["AB", "", "", ""], "界")


def test_text_after_a_match_is_dropped() -> None:
    watch = StopStrings(["x"])
    assert watch.push("axb") == "a"
    assert watch.push("more x") == ""
    assert watch.finish() == ""


def test_text_that_cannot_become_a_stop_goes_out_at_once() -> None:
    assert StopStrings(["\n\nUser:"]).push("a\nb") == "a\nb"
    assert StopStrings(["\n\nUser:"]).push("a\n\nUs") == "a"
    assert StopStrings([]).push("anything") == "anything"


def test_the_stop_complete_first_wins_over_the_one_begun_first() -> None:
    assert run(["ABCD"], ["ABCD", "BC"]) == (["A", ""], "BC")


def test_of_stops_that_end_together_the_longest_is_cut() -> None:
    assert run(["xABC"], ["C", "ABC", "BC"]) == (["x", ""], "ABC")


def test_an_overlapping_start_is_not_missed() -> None:
    assert "".join(run(["aa", "ab", "c"], ["aab"])[0]) == "a"
    assert "".join(run(["abababac"], ["ababac"])[0]) == "ab"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


@given(st.lists(st.text("abc", max_size=6), max_size=8), stops_lists, st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    sent, matched = run(pieces, stops, include)
    text, stop = expected("".join(pieces), stops)
    assert matched == stop
    assert "".join(sent) == text + (stop if include and stop else "")


@given(st.lists(st.text("abc", min_size=1, max_size=6), max_size=8), stops_lists)
def test_only_what_can_still_become_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    text = sent = ""
    for piece in pieces:
        text += piece
        sent += watch.push(piece)
        if watch.matched is not None:
            return
        held = text[len(sent) :]
        assert held == "" or can_become_a_stop(held, stops)
        assert not any(can_become_a_stop(text[start:], stops) for start in range(len(sent)))


def test_the_cost_is_linear_for_text_that_almost_matches() -> None:
    stop = "a" * 20_000 + "b"
    watch = StopStrings([stop])
    start = time.process_time()
    sent = sum(len(watch.push("aa")) for _ in range(40_000))
    assert time.process_time() - start < 5  # a search anew for each piece takes minutes
    assert sent == 60_000
    assert watch.push("b") == "" and watch.matched == stop
