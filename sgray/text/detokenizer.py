"""Token ids to text while they come: what is sent is never taken back and joins to one decode of all ids.

Knows decoders of the `tokenizers` library, nothing of requests. An id costs the same however many came before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"

# Ids that are decoded again before new ones. Decoders treat the very first token apart (they strip its blank) and look
# no farther back than one token otherwise; more than one here, since a token may be nothing but the stripped blank.
_CONTEXT_LEN = 8


class Detokenizer(Protocol):
    """Turns one stream of ids into pieces of text."""

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that is now certain."""
        ...

    def finish(self) -> str:
        """No more ids come: returns what was held back as an unfinished character."""
        ...


class Vocabulary:
    """Single tokens of one tokenizer: their bytes, and which of them a decode leaves out."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.special_ids = frozenset(key for key, token in backend.get_added_tokens_decoder().items() if token.special)
        self.is_byte_level = _decodes_to(backend, ["Ã", "©"], "é")
        self.has_byte_pieces = not self.is_byte_level and _decodes_to(backend, ["<0x41>"], "A")
        self._byte_of_char = _byte_level_alphabet() if self.is_byte_level else {}
        self._token_bytes: dict[int, bytes] = {}  # of the tokens asked for so far: at most the vocabulary

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one stream."""
        kind = _ByteDetokenizer if self.is_byte_level else _WindowDetokenizer
        return kind(self, self.special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, id: int) -> bytes:
        """What the token adds to a text, a part of a character included; nothing for an id without a token."""
        known = self._token_bytes.get(id)
        if known is None:
            known = self._find_bytes(id)
            if known:  # ids without a token are without number
                self._token_bytes[id] = known
        return known

    def _find_bytes(self, id: int) -> bytes:
        token = self.backend.id_to_token(id)
        if token is None:
            return b""
        if self.is_byte_level:
            return self._byte_level_bytes(token)
        byte = self.byte_piece(token)
        return bytes([byte]) if byte is not None else self._piece_text(token).encode()

    def byte_piece(self, token: str) -> int | None:
        """The byte that a byte-fallback piece like <0xF0> stands for."""
        if not self.has_byte_pieces or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None

    def _byte_level_bytes(self, token: str) -> bytes:
        """A token with any character outside the alphabet (an added one) stands for its own text."""
        try:
            return bytes([self._byte_of_char[char] for char in token])
        except KeyError:
            return token.encode()

    def _piece_text(self, token: str) -> str:
        """The token's text in the middle of a text, where decoders do not strip its blank."""
        decoder = self.backend.decoder
        return str(decoder.decode(["a", token]))[1:] if decoder is not None else token


def _decodes_to(backend: tokenizers.Tokenizer, pieces: list[str], text: str) -> bool:
    decoder = backend.decoder
    return decoder is not None and decoder.decode(pieces) == text


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's way to write any byte as a printable character: visible Latin-1 as itself, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


class _ByteDetokenizer:
    """For byte-level tokenizers, whose text is the UTF-8 reading of the tokens' joined bytes.

    Python's incremental decoder replaces what is certainly not a character by the same rule as the library's decode
    (one U+FFFD for each maximal part of a character), and holds back only what can still become one.
    """

    def __init__(self, vocabulary: Vocabulary, skipped_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_back = False

    def push(self, ids: Iterable[int]) -> str:
        raw = b"".join([self._vocabulary.token_bytes(key) for key in ids if key not in self._skipped_ids])
        if not self._holds_back:
            try:
                return raw.decode()  # whole characters, as nearly always; a sixth of the decoder's time
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(raw)
        self._holds_back = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For all other decoders: decode the last few ids with the new ones, and send what the new ones added.

    A run of byte pieces is one string if all of it is UTF-8, else every byte of it becomes U+FFFD, the good ones too.
    So a run is held until another token ends it or until it is certainly broken; a broken one goes out byte by byte.
    """

    def __init__(self, vocabulary: Vocabulary, skipped_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped_ids = skipped_ids
        self._context: list[int] = []
        self._run: list[int] = []
        self._is_broken = False
        self._check = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._push(key) for key in ids if key not in self._skipped_ids)

    def finish(self) -> str:
        return self._close([])

    def _push(self, id: int) -> str:
        token = self._vocabulary.backend.id_to_token(id)
        if token is None:
            return ""
        byte = self._vocabulary.byte_piece(token)
        return self._close([id]) if byte is None else self._push_byte(id, byte)

    def _push_byte(self, id: int, byte: int) -> str:
        self._run.append(id)
        if not self._is_broken:
            try:
                self._check.decode(bytes([byte]))
                return ""
            except UnicodeDecodeError:
                self._is_broken = True
        return self._send_broken()

    def _send_broken(self) -> str:
        text = REPLACEMENT * len(self._run)
        self._remember(self._run)
        self._run = []
        return text

    def _close(self, ids: list[int]) -> str:
        """The run of bytes so far and the ids after it, as text."""
        new = self._run + ids
        self._run = []
        self._is_broken = False
        self._check.reset()
        if not new:
            return ""
        text = self._decode(self._context + new)[len(self._decode(self._context)) :]
        self._remember(new)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._vocabulary.backend.decode(ids, skip_special_tokens=False))

    def _remember(self, ids: list[int]) -> None:
        self._context = (self._context + ids)[-_CONTEXT_LEN:]
