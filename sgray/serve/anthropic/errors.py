"""Errors as Anthropic's clients read them: their shape, their types, and one status that HTTP does not have."""

from __future__ import annotations

from sgray.errors import OverloadedError, SgrayError
from sgray.serve.openai.forms import Json

_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OVERLOADED = 529  # clients know an overload by this status


def is_anthropic(path: str) -> bool:
    """Whether the errors of a path look like this."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def error_answer(error: SgrayError, request_id: str) -> tuple[int, Json]:
    """The status and the body of an error."""
    status = _OVERLOADED if isinstance(error, OverloadedError) else error.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def error_chunks(error: SgrayError, request_id: str) -> list[Json]:
    """What ends a stream that failed."""
    return [error_answer(error, request_id)[1]]
