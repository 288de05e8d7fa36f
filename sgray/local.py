"""A model in this process as text in, text out: one request at a time, no server, no thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.errors import ConfigError, EngineError
from sgray.models.hub import resolve_model
from sgray.protocol import Request, SamplingParams
from sgray.text.tokenizer import Tokenizer


class LocalModel:
    """An engine and its tokenizer. Not for more than one stream at a time."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._ids = (f"local-{number}" for number in itertools.count())

    @classmethod
    def load(cls, config: Config) -> LocalModel:
        """Loads what the configuration names; raises ModelLoadError or ConfigError."""
        if config.model.skip_tokenizer_init:
            raise ConfigError("model.skip_tokenizer_init: text needs a tokenizer; ids alone are served over HTTP")
        engine = Engine.load(config)
        tokenizer_path = config.model.tokenizer_path
        place = Path(engine.info.model_dir) if tokenizer_path is None else resolve_model(tokenizer_path)
        return cls(engine, Tokenizer.load(place, chat_template=config.model.chat_template))

    def complete(self, prompt: str, sampling: SamplingParams) -> Iterator[str]:
        """The continuation of a text, in pieces as they come. Closing the iterator aborts."""
        return self._stream(self._tokenizer.encode(prompt), sampling)

    def chat(self, messages: list[dict[str, Any]], sampling: SamplingParams) -> Iterator[str]:
        """The assistant's answer to a conversation, in pieces as they come. Closing the iterator aborts."""
        return self._stream(self._tokenizer.apply_chat_template(messages), sampling)

    def _stream(self, tokens: list[int], sampling: SamplingParams) -> Iterator[str]:
        request = Request(next(self._ids), tokens, sampling)
        text = self._tokenizer.detokenizer()
        self._engine.add(request)
        try:
            while self._engine.has_work:
                for delta in self._engine.step().deltas:
                    if delta.id != request.id:  # the end of an answer that its reader left
                        continue
                    if delta.finish is not None and delta.finish.error is not None:
                        raise EngineError(delta.finish.error.message)
                    if piece := text.push(delta.tokens):
                        yield piece
            if rest := text.finish():
                yield rest
        finally:
            self._engine.abort(request.id)
