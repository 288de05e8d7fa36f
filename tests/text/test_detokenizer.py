from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from sgray.text.detokenizer import Detokenizer, Vocabulary

if TYPE_CHECKING:
    from sgray.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
HALF_CHARACTER = 10813  # the bytes F0 9F


def word_level(pieces: list[str], decoder: decoders.Decoder | None, special: list[str] | None = None) -> Vocabulary:
    """A tokenizer whose ids are the indices of `pieces`, special ones behind them."""
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in special or []])
    return Vocabulary(backend)


def llama_decoder() -> decoders.Decoder:
    """The decoder of Llama 2 and its kin."""
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """The pieces of one id at a time, and what the end brings."""
    return [*(detokenizer.push([key]) for key in ids), detokenizer.finish()]


def assert_streams_as_whole(vocabulary: Vocabulary, ids: list[int], skip: bool = True) -> str:
    whole = vocabulary.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(vocabulary.detokenizer(skip), ids)) == whole
    at_once = vocabulary.detokenizer(skip)
    assert at_once.push(ids) + at_once.finish() == whole
    return whole


def test_characters_over_several_tokens_come_whole_pub_034(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer.detokenizer(), [50, 27709, 239, 230, HALF_CHARACTER, 116, 114])
    assert pieces == ["B", " ", "", "界", "", "", "🦤", ""]


def test_a_step_costs_the_same_after_any_number_of_steps_pub_035(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces: list[str] = []
    durations = []
    for _ in range(20):
        start = time.process_time()
        pieces += [detokenizer.push([HALF_CHARACTER]) for _ in range(1000)]
        durations.append(time.process_time() - start)
    assert min(durations[-3:]) < 5 * min(durations[:3]) + 0.01
    assert sum(bool(piece) for piece in pieces) > 19_000  # text flows while it runs
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode([HALF_CHARACTER] * 20_000)


def test_a_replacement_character_the_model_wrote_is_text_pub_036(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer.detokenizer(), [24211, 10407]) == ["\ufffd", "yes", ""]


@pytest.mark.parametrize(("words", "text"), [(["▁I", "▁am"], "I am"), (["▁x", "▁▁▁▁▁", "y"], "x     y")])
def test_blanks_are_stripped_at_the_start_alone_pub_037(words: list[str], text: str) -> None:
    pieces = ["▁I", "▁am", "▁x", "▁▁▁▁▁", "y", "?"]
    ids = [pieces.index(word) for word in words]
    assert assert_streams_as_whole(word_level(pieces, llama_decoder()), ids) == text


@pytest.mark.parametrize(("tail", "text"), [(["!"], "🤗!"), ([], "🤗")])
def test_byte_pieces_join_to_one_character_pub_038(tail: list[str], text: str) -> None:
    pieces = [*BYTES, "!", "?"]
    ids = [pieces.index(piece) for piece in ["<0xF0>", "<0x9F>", "<0xA4>", "<0x97>", *tail]]
    vocabulary = word_level(pieces, llama_decoder())
    assert assert_streams_as_whole(vocabulary, ids) == text
    assert "".join(stream(vocabulary.detokenizer(True), ids)[:3]) == ""


@pytest.mark.parametrize(("skip", "text"), [(True, "Hello world"), (False, "Hello<|im_end|> world")])
def test_special_tokens_are_skipped_only_when_told_pub_039(tokenizer: Tokenizer, skip: bool, text: str) -> None:
    ids = [19556, 2, 905]
    assert "".join(stream(tokenizer.detokenizer(skip), ids)) == text
    assert tokenizer.detokenizer(skip).push(ids) == text == tokenizer.decode(ids, skip)


def test_an_unfinished_character_is_flushed_at_the_end_pub_040(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer.detokenizer(), [HALF_CHARACTER]) == ["", "\ufffd"]
    assert tokenizer.decode([HALF_CHARACTER]) == "\ufffd"


ANY_ID = st.integers(0, 49_151) | st.integers(0, 20) | st.integers(100, 260)  # any, special ones, parts of characters


@given(ids=st.lists(ANY_ID, max_size=40), skip=st.booleans())
def test_byte_level_streams_equal_the_whole_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip)
    assert "".join(stream(tokenizer.detokenizer(skip), ids)) == whole
    kept = [key for key in ids if not (skip and key < 17)]
    assert b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", "replace") == whole


BYTE_RUNS = st.lists(st.sampled_from([0x41, 0x80, 0x97, 0x9F, 0xA4, 0xC3, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]), max_size=12)
WORDS = st.lists(st.integers(256, 264), max_size=2)


@pytest.mark.parametrize(
    "decoder",
    [
        llama_decoder(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Metaspace(),
        decoders.WordPiece("##", cleanup=True),
        decoders.BPEDecoder("</w>"),
        None,
    ],
    ids=["llama", "gemma", "two blanks", "metaspace", "word-piece", "suffix", "none"],
)
@given(parts=st.lists(st.tuples(BYTE_RUNS, WORDS), max_size=6), skip=st.booleans())
def test_other_decoders_stream_as_the_whole_decode(
    decoder: decoders.Decoder | None, parts: list[tuple[list[int], list[int]]], skip: bool
) -> None:
    pieces = [*BYTES, "▁am", "▁", "▁▁▁▁▁", "y", "##s", "end</w>", "n't", "?"]
    ids = [key for run, words in parts for key in (*run, *words)]
    assert_streams_as_whole(word_level(pieces, decoder, special=["<s>"]), ids, skip)


def test_a_broken_run_of_byte_pieces_flows_at_once() -> None:
    vocabulary = word_level([*BYTES, "?"], llama_decoder())
    detokenizer = vocabulary.detokenizer(True)
    assert [detokenizer.push([byte]) for byte in (0xF0, 0x9F, 0xFF, 0x41)] == ["", "", "\ufffd" * 3, "\ufffd"]
    assert detokenizer.finish() == ""


def test_ids_without_a_token_give_nothing(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer.detokenizer(), [60_000]) == ["", ""]
    assert stream(word_level(["a", "?"], llama_decoder()).detokenizer(True), [60_000, 0]) == ["", "a", ""]


def test_token_bytes_are_exact_for_parts_of_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(HALF_CHARACTER) == b"\xf0\x9f"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(60_000) == b""
    pieces = [*BYTES, "▁am", "y", "?"]
    vocabulary = word_level(pieces, llama_decoder())
    assert [vocabulary.token_bytes(key) for key in (0xF0, 256, 257)] == [b"\xf0", b" am", b"y"]
