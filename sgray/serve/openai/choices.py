"""One choice of an answer: its deltas of token ids become pieces of text, cut at stop strings, with logprobs.

The choice owns what is held back: the bytes of an unfinished character, text that may begin a stop string, and the
logprobs of tokens whose text has not been sent. Nothing of it is lost: the last piece brings the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from sgray.errors import EngineError, SgrayError
from sgray.protocol import NO_LOGPROBS, Delta, ErrorInfo, Finish, SamplingParams, TokenLogprobs
from sgray.serve.openai.prompts import Prompt
from sgray.serve.openai.sampling import TextOptions
from sgray.text.detokenizer import Detokenizer
from sgray.text.stop import StopStrings
from sgray.text.token_ids import TextCodec

FinishedFor = Literal["stop", "length", "abort"]

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, as in OpenAI's answers: JSON has no infinities."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its logprobs.

    `offset` is where its text begins, in characters. `is_text` is false for an ending token left out of the text.
    """

    token: int
    logprobs: TokenLogprobs | None
    offset: int
    is_text: bool = True


class Piece(msgspec.Struct, frozen=True):
    """What is to be sent next of one choice. `entries` are empty unless logprobs were asked for.

    A msgspec type, since it is made for every token, in a sixth of the time that a frozen dataclass takes.
    """

    text: str = ""
    tokens: list[int] = []
    entries: list[TokenEntry] = []
    finish_reason: FinishedFor | None = None
    matched: int | str | None = None


class Choice:
    """Reads the deltas of one request. Feed it until `is_finished`; then the request may be aborted.

    `keeps_aborted`: where somebody else aborts it, what there is of the answer is the answer, and says so.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        sampling: SamplingParams,
        options: TextOptions,
        tokenizer: TextCodec,
        *,
        echo: bool = False,
        keeps_aborted: bool = False,
    ) -> None:
        self.index = index
        self.num_prompt = len(prompt.tokens)
        self.num_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishedFor | None = None
        self._keeps_aborted = keeps_aborted
        self._prompt = prompt
        self._limit = sampling.max_new_tokens
        self._has_logprobs = sampling.logprobs != NO_LOGPROBS
        self._has_prompt_logprobs = sampling.prompt_logprobs != NO_LOGPROBS
        self._options = options
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer = tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stop, include=options.include_stop) if options.stop else None
        self._awaits_echo = echo
        self._offset = 0
        self._tokens: list[int] = []
        self._entries: list[TokenEntry] = []

    def feed(self, delta: Delta) -> Piece | None:
        """The piece that `delta` completes, if any; raises the error that the delta carries."""
        is_aborted = delta.finish is not None and delta.finish.reason == "abort" and self._keeps_aborted
        if delta.finish is not None and not is_aborted:
            _raise_failure(delta.finish)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if not delta.tokens and delta.finish is None:
            return None
        text = self._echo(delta) if self._awaits_echo else ""
        if self._limit == 0 and not is_aborted:  # the engine drew a token only to compute the prompt's logprobs
            return self._piece(text, Finish("length"))
        text += self._read(delta)
        if self._stops and self._stops.matched is not None:
            return self._piece(text, Finish("stop"), self._stops.matched)
        if delta.finish:
            return self._finish(text, delta.finish)
        return self._piece(text, None) if text or not self._tokenizer.has_text else None

    @property
    def is_finished(self) -> bool:
        """Whether the last piece was made."""
        return self.finish_reason is not None

    @property
    def prompt_tokens(self) -> list[int]:
        """The prompt's ids."""
        return self._prompt.tokens

    def empty(self) -> Piece:
        """The whole answer of a request for no tokens, for which no engine is asked."""
        return self._piece(self._echo(Delta("")) if self._awaits_echo else "", Finish("length"))

    def _read(self, delta: Delta) -> str:
        """The text that the delta's tokens release, up to a stop string; counts them."""
        hidden = delta.finish is not None and delta.finish.matched is not None and not self._options.include_stop
        visible = len(delta.tokens) - hidden
        if not self._stops and not self._has_logprobs:
            self.num_tokens += len(delta.tokens)
            self._tokens += delta.tokens
            return self._detokenizer.push(delta.tokens[:visible])
        text = ""
        for position, token in enumerate(delta.tokens):
            text += self._read_one(token, delta.logprobs[position] if delta.logprobs else None, position < visible)
            if self._stops and self._stops.matched is not None:
                break
        return text

    def _read_one(self, token: int, logprobs: TokenLogprobs | None, is_text: bool) -> str:
        """The text that one token releases."""
        self.num_tokens += 1
        self._tokens.append(token)
        if self._has_logprobs:
            self._entries.append(TokenEntry(token, logprobs, self._offset, is_text))
        if not is_text:
            return ""
        text = self._detokenizer.push([token])
        self._offset += len(text)
        return self._stops.push(text) if self._stops else text

    def _finish(self, text: str, finish: Finish) -> Piece:
        """The last piece: what was held back comes out, and may still hold a stop string."""
        rest = self._detokenizer.finish()
        if not self._stops:
            return self._piece(text + rest, finish, finish.matched)
        text += self._stops.push(rest)
        if self._stops.matched is not None:
            return self._piece(text, Finish("stop"), self._stops.matched)
        return self._piece(text + self._stops.finish(), finish, finish.matched)

    def _piece(self, text: str, finish: Finish | None, matched: int | str | None = None) -> Piece:
        tokens, entries, self._tokens, self._entries = self._tokens, self._entries, [], []
        if finish is None:
            return Piece(text, tokens, entries)
        self.finish_reason = "length" if finish.reason == "error" else finish.reason
        return Piece(text, tokens, entries, self.finish_reason, matched)

    def _echo(self, delta: Delta) -> str:
        """The prompt's text, and the entries of its tokens where logprobs were asked for."""
        self._awaits_echo = False
        tokens, text, skip = self._prompt.tokens, self._prompt.text, self._options.skip_special_tokens
        if text is None:
            text = self._tokenizer.decode(tokens, skip_special_tokens=skip)
        else:  # a start token that the tokenizer added is in the ids but not in the text
            skip = self._tokenizer.decode(tokens, skip_special_tokens=False) != text
        if self._has_prompt_logprobs:
            self._echo_entries(delta.prompt_logprobs or [], self._tokenizer.detokenizer(skip_special_tokens=skip))
        self._offset = len(text)
        return text

    def _echo_entries(self, logprobs: list[TokenLogprobs | None], detokenizer: Detokenizer) -> None:
        if len(logprobs) != self.num_prompt:
            raise EngineError(f"the engine gave logprobs for {len(logprobs)} of {self.num_prompt} prompt tokens")
        offset = 0
        for token, values in zip(self._prompt.tokens, logprobs, strict=True):
            self._entries.append(TokenEntry(token, values, offset))
            offset += len(detokenizer.push([token]))


def raised(info: ErrorInfo) -> SgrayError:
    """The error that crossed a process border as data."""
    error = SgrayError(info.message, param=info.param, code=info.code)
    error.status = info.status
    error.type = info.type
    return error


def finite(logprob: float) -> float:
    """A logprob that JSON can hold: minus infinity (an impossible token) and NaN become the floor."""
    return logprob if LOWEST_LOGPROB < logprob <= 0 else 0.0 if logprob > 0 else LOWEST_LOGPROB


def _raise_failure(finish: Finish) -> None:
    """A failed or aborted request has no answer, and must never look as if it had ended."""
    if finish.reason in ("stop", "length"):
        return
    if finish.error is not None:
        raise raised(finish.error)
    what = "the request was aborted before its end" if finish.reason == "abort" else "the engine failed on this request"
    raise EngineError(what)
