"""What stands where a tokenizer stands in a service that has none: ids come in, ids go out, every text is empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sgray.errors import InvalidRequestError
from sgray.text.detokenizer import Detokenizer
from sgray.text.tokenizer import Tokenizer

REFUSAL = "this server runs without a tokenizer (model.skip_tokenizer_init); send token ids"


class TokenIds:
    """Raises InvalidRequestError for whatever needs a vocabulary; single tokens are shown as `token_id:7`."""

    has_text = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Never succeeds."""
        raise InvalidRequestError(f"A text cannot be read: {REFUSAL}.")

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Never succeeds."""
        raise InvalidRequestError(f"Messages cannot be read: {REFUSAL}.", param="messages")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """One that never gives text."""
        return _Silence()

    def token_bytes(self, id: int) -> bytes:
        """Nothing."""
        return b""

    def token_text(self, id: int) -> str:
        """A name that no two ids share."""
        return f"token_id:{id}"


class _Silence:
    """A detokenizer without a vocabulary."""

    def push(self, ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


TextCodec = Tokenizer | TokenIds
