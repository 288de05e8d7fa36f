"""Grammars in GBNF as the engine's library reads them: which texts they accept, and random texts that they do."""

from __future__ import annotations

import random
from functools import cache

import xgrammar

END = 256
_CLOSING = frozenset(b'"}]>')


@cache
def _compiler() -> xgrammar.GrammarCompiler:
    """Over a vocabulary of single bytes, which compiles in no time."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class Compiled:
    """One grammar."""

    def __init__(self, source: str) -> None:
        self._grammar = _compiler().compile_grammar(xgrammar.Grammar.from_ebnf(source))

    def accepts(self, text: str | bytes) -> bool:
        """Whether the whole of a text is accepted."""
        matcher = xgrammar.GrammarMatcher(self._grammar, terminate_without_stop_token=True)
        return (not text or matcher.accept_string(text)) and matcher.is_completed()

    def wrong(self, good: list[str], bad: list[str]) -> list[str]:
        """The texts that it takes the wrong way."""
        return [text for text in good if not self.accepts(text)] + [text for text in bad if self.accepts(text)]

    def random_text(self, draw: random.Random, most: int = 600) -> str | None:
        """A text that is accepted; None where it did not come to an end in time."""
        matcher, mask = xgrammar.GrammarMatcher(self._grammar), xgrammar.allocate_token_bitmask(1, END + 1)
        text = bytearray()
        for _ in range(most):
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            allowed = [byte for byte in range(END + 1) if words[byte // 32] >> byte % 32 & 1]
            assert allowed, f"nothing can follow {bytes(text)!r}"
            if END in allowed and (len(allowed) == 1 or draw.random() < 0.5):
                return text.decode()
            weights = [0.0 if byte == END else 30 if byte in _CLOSING else 1 if byte < 128 else 0.1 for byte in allowed]
            byte = draw.choices(allowed, weights)[0]
            assert matcher.accept_token(byte)
            text.append(byte)
        return None
