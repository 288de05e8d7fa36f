"""From a grammar's source to what masks the next token. The only file that knows xgrammar.

Everything here is for one vocabulary and runs in the caller's thread; when it runs, for whom, and how much time and
memory a stranger's grammar may take, others decide. xgrammar (Dong et al., arXiv 2411.15100) is imported when the first
compiler is made, because that takes seconds.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgray.engine.sequence import Matcher
from sgray.errors import InvalidRequestError
from sgray.protocol import Grammar, GrammarKind

# As `json.dumps` writes by default. Free white space lets a model that has lost its way write blanks for ever.
SEPARATORS = (", ", ": ")
# CPU time that following one sequence may take: so much a token, and so much saved up or in advance. Usual grammars
# take a twentieth of it; ambiguous ones need more with every token, and the engine does nothing else meanwhile.
TOKEN_S = 0.001
SAVED_S = 0.25
MAX_MESSAGE_CHARS = 400

_PLACE_IN_SOURCE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_PARAMS: dict[GrammarKind, str] = {"json_schema": "response_format", "structural_tag": "response_format"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token id of the model, none for an id that no grammar may use; and which ids end a text."""

    pieces: list[bytes]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Codec:
    """A model's vocabulary, and how text becomes ids of it."""

    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]

    @classmethod
    def load(cls, directory: Path, vocab_size: int, end_ids: tuple[int, ...]) -> Codec:
        """Of the tokenizer in a directory; `vocab_size` is the model's. Raises ModelLoadError."""
        from sgray.text.tokenizer import Tokenizer  # transformers is needed from here on

        tokenizer = Tokenizer.load(directory)
        unusable = tokenizer.special_ids.union(end_ids)
        pieces = [b"" if token in unusable else tokenizer.token_bytes(token) for token in range(vocab_size)]
        return cls(Vocabulary(pieces, end_ids), lambda text: tokenizer.encode(text, add_special_tokens=False))


class Compiler:
    """Compiles grammars for one vocabulary. May be used from several threads; making one takes seconds.

    `encode`: the tokenizer's, for text that a grammar forces; without it such text is drawn token by token.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary.pieces,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.pieces),
            stop_token_ids=list(vocabulary.end_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._new_matcher = xgrammar.GrammarMatcher
        self._vocabulary = vocabulary
        self._encode = encode
        self._usable_W = _bits([token for token, piece in enumerate(vocabulary.pieces) if piece], vocabulary)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequestError that says what is wrong with the source. `grammar.after` is not looked at."""
        source, compiler = grammar.source, self._compiler
        try:
            if grammar.kind == "json_schema":
                handle = compiler.compile_json_schema(source, any_whitespace=False, separators=SEPARATORS)
            elif grammar.kind == "regex":
                handle = compiler.compile_regex(source)
            elif grammar.kind == "ebnf":
                handle = compiler.compile_grammar(source)
            else:
                handle = compiler.compile_structural_tag(source)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise unusable(grammar.kind, _reason(error)) from None
        return CompiledGrammar(handle, self._new_matcher, self._vocabulary, self._encode, self._usable_W, grammar.kind)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is ready for any number of sequences. `usable_W`: a bit for each ordinary token."""

    handle: Any
    new_matcher: Callable[[Any], Any]
    vocabulary: Vocabulary
    encode: Callable[[str], list[int]] | None
    usable_W: np.ndarray
    kind: GrammarKind

    @property
    def num_bytes(self) -> int:
        """Roughly the memory that it holds."""
        return int(self.handle.memory_size_bytes)

    def start(self, after: Sequence[int], stop_ids: frozenset[int]) -> TokenMatcher:
        """A matcher for one sequence, of whose generated tokens nothing is known yet."""
        return TokenMatcher(self, tuple(after), stop_ids)


class TokenMatcher(Matcher):
    """Follows one sequence's generated tokens through a grammar. `stop_ids`: what may end that sequence."""

    def __init__(self, compiled: CompiledGrammar, after: tuple[int, ...], stop_ids: frozenset[int]) -> None:
        vocabulary = compiled.vocabulary
        self._matcher = compiled.new_matcher(compiled.handle)
        self._kind = compiled.kind
        self._encode = compiled.encode
        self._pieces = vocabulary.pieces
        self._usable_W = compiled.usable_W
        self._row_W = np.zeros((1, len(self._usable_W)), dtype=np.int32)
        self._end_ids = [token for token in vocabulary.end_ids if token in stop_ids]
        self._after = after
        self._last: deque[int] = deque(maxlen=len(after))
        self._is_active = not after
        self._left_s = SAVED_S

    def accept(self, token: int) -> None:
        """Go on by a token that was drawn from the last mask and did not end the sequence.

        Raises InvalidRequestError when the grammar takes too long.
        """
        if not self._is_active:
            self._last.append(token)
            self._is_active = tuple(self._last) == self._after
            return
        begin = time.thread_time()
        self._left_s = min(SAVED_S, self._left_s + TOKEN_S)
        is_accepted = self._matcher.accept_token(token)
        self._charge(begin)
        if not is_accepted:
            raise unusable(self._kind, f"the token {token} does not follow it")

    def forced(self) -> list[int]:
        """Tokens of text that is the only one possible from here; the matcher has gone on by them.

        The text is cut as the tokenizer cuts it. Its last token is left to be drawn, unless the grammar ends behind it:
        with text that is not forced it may be one token. Idea: jump-forward decoding of SGLang (Zheng et al., arXiv
        2312.07104).
        """
        if not self._is_active or self._encode is None:
            return []
        begin = time.thread_time()
        tokens = self._forced_tokens(self._encode)
        count = 0
        while count < len(tokens) and self._matcher.accept_token(tokens[count]):
            count += 1
        if count and not self._is_over():
            count -= 1
            self._matcher.rollback(1)
        self._charge(begin)
        return tokens[:count]

    def _forced_tokens(self, encode: Callable[[str], list[int]]) -> list[int]:
        text = self._matcher.find_jump_forward_string()
        if not text:
            return []
        tokens = encode(text)
        is_exact = b"".join([self._pieces[token] for token in tokens]) == text.encode()
        return tokens if is_exact else []  # some tokenizers put a blank in front; and special tokens have no text here

    def _is_over(self) -> bool:
        if not self._matcher.is_completed():
            return False
        self._matcher.fill_next_token_bitmask(self._row_W)
        return not (self._row_W[0] & self._usable_W).any()

    def mask(self, held: frozenset[int]) -> bytes | None:
        """Which ids may be drawn next, a bit an id; None when nothing but the end may follow.

        `held` ids are left out while anything else is possible. Raises InvalidRequestError for a dead end.
        """
        if not self._is_active:
            return self._everything(held)
        begin = time.thread_time()
        row_W = self._row_W[0]
        self._matcher.fill_next_token_bitmask(self._row_W)
        row_W &= self._usable_W
        is_completed = self._matcher.is_completed()
        self._charge(begin)
        if not row_W.any():
            if is_completed:
                return None
            raise unusable(self._kind, "no token of this model's vocabulary can follow what it has led to")
        return self._with_ends(row_W, held, is_completed)

    def _with_ends(self, row_W: np.ndarray, held: frozenset[int], is_completed: bool) -> bytes:
        mask = bytearray(row_W.tobytes())
        for token in self._end_ids if is_completed else ():
            if token not in held:
                mask[token >> 3] |= 1 << (token & 7)
        without = bytearray(mask)
        _clear(without, held)
        return bytes(without if any(without) else mask)

    def _everything(self, held: frozenset[int]) -> bytes:
        mask = bytearray(b"\xff" * (4 * len(self._usable_W)))
        _clear(mask, held)
        return bytes(mask)

    def _charge(self, begin: float) -> None:
        """Count the CPU time since `begin`."""
        self._left_s -= time.thread_time() - begin
        if self._left_s < 0:
            raise unusable(self._kind, "it is too ambiguous: it takes too long to follow")


def unusable(kind: GrammarKind, reason: str) -> InvalidRequestError:
    """The refusal of a grammar."""
    return InvalidRequestError(f"the grammar ({kind}) cannot be used: {reason}", param=_PARAMS.get(kind, kind))


def _reason(error: BaseException) -> str:
    """What xgrammar said, without the place in its own source."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return "it takes too much memory to compile"
    lines = _PLACE_IN_SOURCE.sub("", str(error)).strip().splitlines()
    return lines[0][:MAX_MESSAGE_CHARS] if lines else "it cannot be compiled"


def _bits(ids: Sequence[int], vocabulary: Vocabulary) -> np.ndarray:
    """A row of int32 words with these bits set."""
    num_words = -(-len(vocabulary.pieces) // 32)
    flags = np.zeros(32 * num_words, dtype=np.uint8)
    flags[np.array(ids, dtype=np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _clear(mask: bytearray, ids: frozenset[int]) -> None:
    for token in ids:
        mask[token >> 3] &= ~(1 << (token & 7))
