"""Errors that only programs and their clients can meet. Knows nothing of who raises them."""

from __future__ import annotations

from sgray.errors import InvalidRequestError, SgrayError


class UnavailableError(InvalidRequestError):
    """What was asked for exists elsewhere, but not here, or not on this backend."""

    code = "not_available"


class EndpointError(SgrayError):
    """A server could not be reached, or answered with an error of its own."""

    code = "endpoint_error"


class ProgramCancelledError(SgrayError):
    """The program was cancelled, or whoever could have read its results has let go of it."""

    code = "cancelled"


class WouldBlockError(SgrayError):
    """A blocking read on the very event loop that would have to bring the value."""

    code = "would_block"
