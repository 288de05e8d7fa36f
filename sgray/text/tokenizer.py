"""Text to ids and ids to text, with the tokenizer and the chat template of a model directory.

Files are read by transformers, so that ids and prompts equal what it gives; text is handled by the `tokenizers` object
inside it, without truncation, padding or clean-up. Free of torch: only the fast tokenizer's class is imported, since
AutoTokenizer imports torch (190 MB more); a directory without tokenizer.json that names a class of its own needs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from sgray.errors import InvalidRequestError, ModelLoadError
from sgray.text.chat import ChatTemplate
from sgray.text.detokenizer import Detokenizer, Vocabulary

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_VOCAB_FILE = "vocab.json"
_MERGES_FILE = "merges.txt"
_SENTENCEPIECE_FILE = "tokenizer.model"

# Classes that say nothing of how vocab.json and merges.txt are to be read.
_GENERIC_CLASSES = {None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"}


class Tokenizer:
    """One model's tokenizer; immutable, so it may be used from several threads. Make it with `load`."""

    has_text = True

    def __init__(self, pretrained: PreTrainedTokenizerFast, chat_template: str | None) -> None:
        self._backend: tokenizers.Tokenizer = pretrained.backend_tokenizer
        # A tokenizer file may say to cut texts; a prompt that is cut in silence is worse than one that is refused.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._vocabulary = Vocabulary(self._backend)
        self._chat_template = ChatTemplate(pretrained, chat_template)

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of the model directory `path`; the Jinja file `chat_template`, if given, replaces its own.

        Raises ModelLoadError that names the missing or damaged file.
        """
        source = None if chat_template is None else _read_template(Path(chat_template).expanduser())
        _refuse_missing(path)
        try:
            return cls(_load_pretrained(path), source)
        except ModelLoadError:
            raise
        except Exception as error:  # tokenizers raises plain Exception for a damaged file
            raise ModelLoadError(f"cannot read the tokenizer in {path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be turned into a prompt."""
        return self._chat_template.exists

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that stand for no text, such as the ends of turns."""
        return self._vocabulary.special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with what the tokenizer's own post-processor adds unless `add_special_tokens` is off."""
        return list(self._backend.encode(_valid(text), add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text."""
        texts = [_valid(text) for text in texts]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token give nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one stream of ids, whose joined text equals `decode` of all of them."""
        return self._vocabulary.detokenizer(skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of one token, which may be a part of a character; empty for an id without a token."""
        return self._vocabulary.token_bytes(id)

    def token_text(self, id: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of chat `messages`. Raises InvalidRequestError where there is no template or it refuses them.

        `continue_final_message` leaves the last message open for the model to go on with; `template_kwargs` are
        further variables for the template.
        """
        return self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids of `render_chat`. The template writes all special tokens itself, so the tokenizer adds none."""
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)


def _valid(text: str) -> str:
    """`text` itself, if it is Unicode text; JSON can carry half of a surrogate pair, which is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"the text is not valid Unicode: {error.reason} at character {error.start}"
        raise InvalidRequestError(reason) from error
    return text


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read the chat template file {path}: {error}") from error


def _refuse_missing(path: Path) -> None:
    if not path.is_dir():
        raise ModelLoadError(f"the tokenizer directory {path} does not exist")
    if any((path / name).is_file() for name in (_TOKENIZER_FILE, _SENTENCEPIECE_FILE)):
        return
    missing = [name for name in (_VOCAB_FILE, _MERGES_FILE) if not (path / name).is_file()]
    if len(missing) == 1:
        raise ModelLoadError(f"{path} has neither {_TOKENIZER_FILE} nor {missing[0]}, of which one is needed")
    if missing:
        raise ModelLoadError(
            f"{path} has no tokenizer: expected {_TOKENIZER_FILE}, or {_VOCAB_FILE} with {_MERGES_FILE}, "
            f"or {_SENTENCEPIECE_FILE}"
        )


def _load_pretrained(path: Path) -> PreTrainedTokenizerFast:
    """A tokenizer.json is taken as it stands, whichever class the directory names: some rebuild it and lose parts."""
    if (path / _TOKENIZER_FILE).is_file():
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    if (path / _VOCAB_FILE).is_file() and _named_class(path) in _GENERIC_CLASSES:
        from transformers import GPT2Tokenizer

        return GPT2Tokenizer.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _named_class(path: Path) -> str | None:
    try:
        config = json.loads((path / _CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    name = config.get("tokenizer_class")
    return None if name is None else str(name)
