"""One request's life in the engine: its tokens, how many of them are computed, what it waits for, how it ended.

Knows no device, batch or queue. A sequence has no phases: what is left to do is `num_remaining`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sgray.errors import SgrayError
from sgray.memory.cache import KVLease
from sgray.protocol import (
    NO_LOGPROBS,
    Delta,
    ErrorInfo,
    Finish,
    Mark,
    MarkName,
    Request,
    TokenLogprobs,
    Trail,
)

NO_SLOT = -1
PREFIX_WAIT = "prefix"
GRAMMAR_WAIT = "grammar"


class Matcher(Protocol):
    """Follows the generated tokens of one sequence through its grammar. Methods raise the SgrayError that ends it."""

    def accept(self, token: int) -> None:
        """Go on by a token."""

    def forced(self) -> list[int]:
        """Tokens that must follow, which it has gone on by."""

    def mask(self, held: frozenset[int]) -> bytes | None:
        """What may be drawn next, as in a `StepPlan`, without `held` if possible; None if only the end may follow."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one request. It may be scheduled when `waits` is empty.

    `tokens[:num_prompt]` is the prompt, the rest is generated. `num_computed` counts what is planned: once the steps in
    flight are done, `[0, num_computed)` stand in the lease's pages. `num_pending` tokens are drawn by those steps and
    follow `tokens`; nobody here knows them yet. `seed` and the index of a generated token fix its random draw. `number`
    and `arrival` (seconds) never change, so a retracted sequence keeps its age. `num_uncached` estimates, while it
    waits, how many tokens it will have to compute. With a `matcher`, `mask` is for the token after `tokens`. The answer
    is of no use after `deadline` (seconds). `num_sent` generated tokens have been told to the outside. `is_retracted`:
    it has run before, if only elsewhere. `marks` are kept of traced requests alone.
    """

    request: Request
    number: int
    arrival: float
    seed: int
    namespace: bytes
    hashes: list[int]
    max_length: int
    stop_ids: frozenset[int]
    num_uncached: int = 0
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    lease: KVLease | None = None
    slot: int = NO_SLOT
    num_sent_pages: int = 0
    last_step: int = -1
    waits: set[str] = field(default_factory=set)
    awaited_page: int | None = None
    is_retracted: bool = False
    num_cached: int | None = None
    finish: Finish | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    has_emitted: bool = False
    matcher: Matcher | None = None
    mask: bytes = b""
    num_sent: int = 0
    deadline: float = math.inf
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.num_sent = self.request.num_generated
        self.is_retracted = self.is_retracted or self.num_sent > 0
        sampling = self.request.sampling
        if sampling.prompt_logprobs != NO_LOGPROBS:
            self.prompt_logprobs = [None] * min(max(1, sampling.prompt_logprobs_start), self.num_prompt)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.request.num_prompt

    @property
    def num_generated(self) -> int:
        """Known tokens beyond the prompt."""
        return len(self.tokens) - self.request.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens, pending ones included, that no step has been planned for: 1 for a sequence that decodes."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def may_grow(self) -> bool:
        """Whether another token may be drawn after those that are pending."""
        return len(self.tokens) + self.num_pending < self.max_length

    @property
    def is_drawn_out(self) -> bool:
        """Whether the last token that may be drawn is pending, so that nothing is left to compute."""
        return self.num_pending > 0 and len(self.tokens) + self.num_pending >= self.max_length

    @property
    def max_cached(self) -> int:
        """The most tokens that may come from the cache: positions whose logits are still asked for must be computed."""
        if self.prompt_logprobs is None:
            return len(self.tokens) - 1
        return min(len(self.prompt_logprobs), len(self.tokens)) - 1

    def collect_prompt_logprobs(self, start: int, entries: list[TokenLogprobs] | None) -> None:
        """Keep the logprobs of prompt tokens `start + 1` and on, as far as they are new."""
        if self.prompt_logprobs is not None and entries is not None:
            self.prompt_logprobs += entries[len(self.prompt_logprobs) - start - 1 :]

    def accept(self, token: int) -> None:
        """Append the token drawn longest ago and those that its grammar then forces; finish where that is the end."""
        self.num_pending -= 1
        self.tokens.append(token)
        if self._is_stop(token):
            self.finish = Finish("stop", matched=token)
        elif self.matcher is not None:
            self._follow(self.matcher, token)
        if self.finish is None and len(self.tokens) >= self.max_length:
            self.finish = Finish("length")

    def begin_matching(self, matcher: Matcher) -> None:
        """Obey a grammar from the next token on; finish if it allows none.

        An answer that began elsewhere ends where a token was drawn and what it forced was appended, so that the matcher
        has only to follow.
        """
        self.matcher = matcher
        if not self.num_generated:
            self._follow(matcher, None)
            return
        try:
            for token in self.tokens[self.num_prompt :]:
                matcher.accept(token)
            self._renew_mask(matcher)
        except SgrayError as error:
            self.finish = failure(error)

    def take_unsent(self) -> list[int]:
        """The generated tokens that the outside has not heard of."""
        tokens = self.tokens[self.num_prompt + self.num_sent :]
        self.num_sent = self.num_generated
        return tokens

    def mark(self, name: MarkName, step: int, clock: Callable[[], float]) -> None:
        """Note that this happens to it now, if anybody wants to know."""
        if self.request.trace_headers:
            num_cached = 0 if self.lease is None else self.lease.num_cached
            self.marks.append(Mark(name, step, clock(), len(self.tokens), num_cached))

    def trail(self) -> Trail:
        """All that was noted, once it has ended."""
        assert self.finish is not None
        return Trail(self.request, self.marks, self.finish)

    def _is_stop(self, token: int) -> bool:
        return token in self.stop_ids and self.num_generated > self.request.sampling.min_new_tokens

    @property
    def _may_jump(self) -> bool:
        """Whether tokens may be appended that nobody draws: they have no logprobs, and no penalty counts them."""
        sampling = self.request.sampling
        has_penalty = (
            sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        )
        return sampling.logprobs == NO_LOGPROBS and not has_penalty

    def _follow(self, matcher: Matcher, token: int | None) -> None:
        """Go on in the grammar by a token, and prepare for the next one; finish where there can be none."""
        try:
            if token is not None:
                matcher.accept(token)
            if self._may_jump:
                self._append_forced(matcher.forced())
            if self.finish is None:
                self._renew_mask(matcher)
        except SgrayError as error:
            self.finish = failure(error)

    def _append_forced(self, tokens: list[int]) -> None:
        for token in tokens:
            if len(self.tokens) >= self.max_length:
                self.finish = Finish("length")
                return
            self.tokens.append(token)
            if self._is_stop(token):
                self.finish = Finish("stop", matched=token)
                return

    def _renew_mask(self, matcher: Matcher) -> None:
        is_held = self.num_generated < self.request.sampling.min_new_tokens
        mask = matcher.mask(self.stop_ids if is_held else frozenset())
        if mask is None:
            self.finish = Finish("stop")
        else:
            self.mask = mask

    def delta(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        """What the outside has not heard yet: these new tokens, the finish if any, and what comes but once."""
        cached = None if self.has_emitted else self.num_cached or 0
        self.has_emitted = True
        prompt_logprobs = None
        if self.prompt_logprobs is not None and (tokens or self.finish):
            if len(self.prompt_logprobs) == self.num_prompt:
                prompt_logprobs = self.prompt_logprobs
            self.prompt_logprobs = None
        return Delta(
            self.request.id,
            tokens,
            logprobs if self.request.sampling.logprobs != NO_LOGPROBS else None,
            self.finish,
            cached,
            prompt_logprobs,
        )


def failure(error: SgrayError) -> Finish:
    """The end of a sequence that met an error."""
    told = ErrorInfo(error.status, error.type, error.message, error.param, error.code, error.retry_after_s)
    return Finish("error", error=told)
