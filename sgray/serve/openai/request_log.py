"""One line of JSON for each finished HTTP request, in a file: who called what, how it went, how long it took.

A line holds counts, times and names, never text of a prompt or an answer, and of a key no more than the beginning of
its digest. It knows no metrics and no routes.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.types import Scope

from sgray.errors import ConfigError
from sgray.serve.openai.allowance import GENERATION
from sgray.serve.openai.generation import Generation
from sgray.serve.openai.http import REQUEST_ID
from sgray.serve.openai.keys import CALLER

logger = logging.getLogger(__name__)

KEY_DIGITS = 12


class RequestLog:
    """Appends to a file, which others may append to as well, or move away: then a new one is begun.

    Raises ConfigError where that cannot be done. A disk that fails later is told in the process's log, and is no reason
    to refuse calls.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._has_failed = False
        try:
            self._append("")
        except OSError as error:
            raise ConfigError(f"api.request_log: {path}: {error.strerror}") from None

    def write(self, scope: Scope, route: str, status: int, began: float) -> None:
        """A request is over; it `began` at that time of the monotonic clock."""
        now = time.monotonic()
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "id": scope[REQUEST_ID],
            "method": scope["method"],
            "route": route,
            "status": status,
            "total_s": round(now - began, 6),
            **_of_call(scope.get(GENERATION), began),
        }
        caller: str | None = scope.get(CALLER)
        if caller is not None:
            line["key"] = caller[:KEY_DIGITS]
        try:
            self._append(json.dumps(line) + "\n")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.error("api.request_log: %s: %s; lines are lost", self._path, error.strerror)
            self._has_failed = True

    def _append(self, text: str) -> None:
        """One write, so that lines of several processes do not mix."""
        with self._path.open("ab", buffering=0) as file:
            file.write(text.encode())


def _of_call(generation: Generation | None, began: float) -> dict[str, Any]:
    """What only calls of the model have. `outcome` tells of a stream what its status cannot."""
    if generation is None:
        return {}
    usage, first = generation.usage(), generation.first_token
    return {
        "outcome": generation.outcome,
        "first_token_s": None if first is None else round(first - began, 6),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "replica": generation.replica,
    }
