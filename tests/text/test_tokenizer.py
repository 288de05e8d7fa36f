from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sgray.errors import InvalidRequestError, ModelLoadError
from sgray.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

TEXTS = [
    "",
    "Hello world",
    "DEF",
    "  two  blanks\n\n",
    "12345",
    "Ünïcödé 界🦤",
    "<|im_start|>user\nHi<|im_end|>",
    "\x00",
]


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_dir)


@pytest.fixture
def with_start_token(tmp_path: Path) -> Tokenizer:
    """A tokenizer whose post-processor adds <s>, and a template that writes <s> itself."""
    backend = tokenizers.Tokenizer(models.WordLevel({"hi": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    backend.enable_truncation(4)
    backend.enable_padding(pad_id=1, pad_token="?")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<s>{% for m in messages %}{{ m.content }}{% endfor %}")
    return Tokenizer.load(tmp_path)


def test_ids_and_texts_equal_those_of_transformers(tokenizer: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_batch_equals_its_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


# The vocabulary of the model lacks some control characters, and bytes that no character in use begins with.
@given(text=st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]), max_size=30))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_size_counts_added_tokens(tokenizer: Tokenizer, with_start_token: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49_152
    assert with_start_token.vocab_size == 3


def test_the_start_token_is_never_doubled_pub_073(with_start_token: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = with_start_token.apply_chat_template(messages)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == [2, 0]
    assert with_start_token.encode("hi") == [2, 0]
    assert with_start_token.encode("hi", add_special_tokens=False) == [0]
    assert with_start_token.encode_batch(["hi"], add_special_tokens=False) == [[0]]


def test_a_long_text_is_not_cut_nor_a_short_one_padded(with_start_token: Tokenizer) -> None:
    assert with_start_token.encode("hi " * 9) == [2] + [0] * 9
    assert with_start_token.encode_batch(["hi hi", "hi"]) == [[2, 0, 0], [2, 0]]


def test_decoding_cleans_nothing_up(tokenizer: Tokenizer) -> None:
    text = "Hello , world ! do n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(InvalidRequestError, match=r"not valid Unicode.*character 1"):
            encode("a\ud83e")


def test_tokens_have_text_and_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(905) == " world"
    assert (tokenizer.token_text(10813), tokenizer.token_bytes(10813)) == ("\ufffd", b"\xf0\x9f")


def test_a_directory_without_tokenizer_files_is_refused_by_name_pub_124(model_dir: Path, tmp_path: Path) -> None:
    shutil.copy(model_dir / "config.json", tmp_path)
    with pytest.raises(ModelLoadError, match=r"no tokenizer: expected tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"merges\.txt"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("names", [("config.json", "tokenizer_config.json"), ("config.json",)])
def test_vocabulary_and_merges_alone_are_enough_pub_124(
    model_dir: Path, tmp_path: Path, tokenizer: Tokenizer, names: tuple[str, ...]
) -> None:
    for name in names:
        shutil.copy(model_dir / name, tmp_path)
    tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")).model.save(str(tmp_path))
    loaded = Tokenizer.load(tmp_path)
    text = "Hello world, 界🦤!"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"{}"], ids=["cut", "empty"])
def test_a_damaged_tokenizer_file_is_refused_by_name(
    model_dir: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage((model_dir / "tokenizer.json").read_bytes()))
    with pytest.raises(ModelLoadError, match="cannot read the tokenizer in"):
        Tokenizer.load(tmp_path)


def test_loading_and_rendering_import_no_torch(model_dir: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from sgray.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.load(pathlib.Path(sys.argv[1]))\n"
        "assert tokenizer.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\n"
        "print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip() == "False"
