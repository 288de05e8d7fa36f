"""What one key may use: calls in work at a time, and tokens a minute. Without keys nobody is told apart, or limited.

The tokens are a bucket that holds a minute's worth and fills steadily. A call takes out, before it begins, its prompt
and what its answers are expected to need; when it ends, however it ends, it has taken what it used. Longer answers than
expected are paid for by the calls after them, since the bucket may sink below empty. It knows digests of keys, no keys,
and of a call only its counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgray.config import Config
from sgray.errors import RateLimitError, TokenRateLimitError
from sgray.serve.openai.generation import Call, Generation
from sgray.serve.openai.http import TRACE_HEADERS, error_response
from sgray.serve.openai.keys import CALLER

GENERATION = "sgray.generation"
"""Where a scope keeps the `Generation` of its call, once there is one."""

EXPECTED_ANSWER = 1024
"""Tokens that a longer answer is expected to have at first: limits are mostly far above what is needed."""

_HOLD = "sgray.hold"  # where a scope keeps what its call has taken
_MINUTE_S = 60.0


class Account:
    """What one key has in use. `max_requests` and `max_tokens` (a minute) are None where there is no limit."""

    def __init__(self, max_requests: int | None, max_tokens: int | None, now: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._now = now
        self._num_in_work = 0
        self._left = float(max_tokens or 0)
        self._filled = now()

    @property
    def is_fresh(self) -> bool:
        """Whether it is as a new one."""
        self._fill()
        return self._num_in_work == 0 and self._left >= (self._max_tokens or 0)

    def enter(self) -> None:
        """A call more; raises RateLimitError where that is one too many, or no token is left."""
        if self._max_requests is not None and self._num_in_work >= self._max_requests:
            raise RateLimitError(
                f"This key has {self._num_in_work} calls in work, and may have {self._max_requests} at a time; "
                "try again when one has ended."
            )
        if self._max_tokens is not None:
            self._check_left(1, self._max_tokens)
        self._num_in_work += 1

    def take(self, num_prompt: int, num_expected: int) -> int:
        """Take tokens out for a call, and say how many; raises RateLimitError where too few are left."""
        if self._max_tokens is None:
            return 0
        if num_prompt > self._max_tokens:
            raise TokenRateLimitError(
                f"The prompt has {num_prompt} tokens, and a key may use {self._max_tokens} tokens a minute; "
                "shorten the prompt."
            )
        wanted = min(num_prompt + num_expected, self._max_tokens)
        self._check_left(wanted, self._max_tokens)
        self._left -= wanted
        return wanted

    def leave(self, num_taken: int, num_used: int) -> None:
        """A call ended: it used so many tokens of those it had taken, or more."""
        self._num_in_work -= 1
        self._fill()
        self._left = min(self._left + num_taken - num_used, float(self._max_tokens or 0))

    def headers(self) -> dict[str, str]:
        """What is left, in OpenAI's headers. When calls in work end cannot be known: a second is the least."""
        found: dict[str, str] = {}
        if self._max_requests is not None:
            found["x-ratelimit-limit-requests"] = str(self._max_requests)
            found["x-ratelimit-remaining-requests"] = str(self._max_requests - self._num_in_work)
            found["x-ratelimit-reset-requests"] = "1s" if self._num_in_work else "0s"
        if self._max_tokens is not None:
            self._fill()
            found["x-ratelimit-limit-tokens"] = str(self._max_tokens)
            found["x-ratelimit-remaining-tokens"] = str(max(0, math.floor(self._left)))
            found["x-ratelimit-reset-tokens"] = _span(self._seconds_until(self._max_tokens, self._max_tokens))
        return found

    def _check_left(self, wanted: int, most: int) -> None:
        self._fill()
        if self._left >= wanted:
            return
        seconds = math.ceil(self._seconds_until(wanted, most))
        raise TokenRateLimitError(
            f"This key may use {most} tokens a minute and has {max(0, math.floor(self._left))} left now; this call "
            f"needs {wanted}. Try again in {seconds} s.",
            retry_after_s=max(1, seconds),
        )

    def _seconds_until(self, wanted: int, most: int) -> float:
        return max(0.0, (wanted - self._left) * _MINUTE_S / most)

    def _fill(self) -> None:
        now, most = self._now(), float(self._max_tokens or 0)
        self._left = min(most, self._left + (now - self._filled) * most / _MINUTE_S)
        self._filled = now


class _Hold:
    """What one call has taken from its key's account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._num_taken = 0
        account.enter()

    def take(self, call: Call) -> None:
        num_answers = sum(min(one.max_new_tokens, EXPECTED_ANSWER) for one in call.sampling) * call.n
        self._num_taken += self._account.take(sum(len(prompt.tokens) for prompt in call.prompts), num_answers)

    def end(self, num_used: int) -> None:
        self._account.leave(self._num_taken, num_used)


class Limited:
    """Holds each key to its share of the limits, on the paths that `paths` names, and tells it what is left.

    With several ingresses each grants its share, since they do not know of each other's calls.
    """

    def __init__(
        self, app: ASGIApp, config: Config, paths: Collection[str], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._now = now
        self._paths = frozenset(paths)
        wanted = config.serve.num_ingress_replicas
        num_ingresses = 1 if wanted == "auto" else wanted
        self._max_requests = _share(config.api.max_requests_per_key, num_ingresses)
        self._max_tokens = _share(config.api.max_tokens_per_minute_per_key, num_ingresses)
        self._accounts: dict[str, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or answer 429."""
        caller = self._caller(scope)
        if caller is None:
            await self._app(scope, receive, send)
            return
        account = self._account(caller)

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers())
            await send(message)

        try:
            hold = scope[_HOLD] = _Hold(account)
        except RateLimitError as error:
            await error_response(error, scope)(scope, receive, telling)
            return
        try:
            await self._app(scope, receive, telling)
        finally:
            generation: Generation | None = scope.get(GENERATION)
            hold.end(0 if generation is None else generation.num_used())

    def _caller(self, scope: Scope) -> str | None:
        """The key's digest, where its call is limited."""
        if scope["type"] != "http" or (self._max_requests is None and self._max_tokens is None):
            return None
        path: str = scope["path"]
        caller: str | None = scope.get(CALLER)
        return caller if path.removeprefix(scope.get("root_path", "")) in self._paths else None

    def _account(self, caller: str) -> Account:
        """The caller's account. Before there is another one, those that are as good as new are dropped: their keys may
        have been taken back."""
        if caller not in self._accounts:
            self._accounts = {name: account for name, account in self._accounts.items() if not account.is_fresh}
            self._accounts[caller] = Account(self._max_requests, self._max_tokens, self._now)
        return self._accounts[caller]


def begin(scope: Scope, generation: Generation) -> None:
    """A call is about to run, traced as its scope says. Raises RateLimitError where its key has too few tokens left."""
    hold: _Hold | None = scope.get(_HOLD)
    if hold is not None:
        hold.take(generation.call)
    generation.trace_headers = scope.get(TRACE_HEADERS, {})
    scope[GENERATION] = generation


def _share(limit: int | None, num_ingresses: int) -> int | None:
    return None if limit is None else max(1, limit // num_ingresses)


def _span(seconds: float) -> str:
    """A duration as OpenAI writes it: 20ms, 1.5s, 2m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds else "0s"
    minutes, rest = divmod(math.ceil(seconds * 100) / 100, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
