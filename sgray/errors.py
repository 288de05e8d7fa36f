"""Every error that a user of sgray can meet, with the HTTP answer it becomes.

Knows nothing of HTTP libraries: an error is a message, a status and three short words in OpenAI's shape
(`type`, `param`, `code`). Anything that is not a `SgrayError` is a fault of the program and becomes a 500.
"""

from __future__ import annotations


class SgrayError(Exception):
    """Base of all errors with a meaning for the user.

    `message` says what was wrong, what was expected and what to do. `param` names the offending field, if any.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The answer's JSON body in OpenAI's error shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(SgrayError):
    """The request can never succeed as it stands."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit the model's context or the key-value memory."""

    code = "context_length_exceeded"


class InvalidKeyError(InvalidRequestError):
    """No key was given where one is needed, or one that does not open anything here."""

    status = 401
    code = "invalid_api_key"


class AdminKeyRequiredError(SgrayError):
    """The key is good, but the route is the operator's."""

    status = 403
    type = "permission_error"
    code = "admin_key_required"


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class NotFoundError(InvalidRequestError):
    """No such route, or nothing of that name behind it."""

    status = 404
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The route exists, the HTTP method does not."""

    status = 405
    code = "method_not_allowed"


class RequestTooLargeError(InvalidRequestError):
    """The body is larger than the configured limit."""

    status = 413
    code = "request_too_large"


class UrlTooLongError(InvalidRequestError):
    """Path and query are longer than the configured limit."""

    status = 414
    code = "url_too_long"


class HeadersTooLargeError(InvalidRequestError):
    """The headers together are larger than the configured limit."""

    status = 431
    code = "headers_too_large"


class RequestTimeoutError(SgrayError):
    """The request ran longer than the configured limit and was stopped."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class OverloadedError(SgrayError):
    """Queues are full, or no replica accepts work now; the client may try again after `retry_after_s`."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"
    retry_after_s = 1


class ReplicaLostError(SgrayError):
    """The replica that worked on the request is gone, and so were those that it was moved to; it can be sent again."""

    status = 503
    code = "replica_lost"


class ReplicaDrainingError(ReplicaLostError):
    """The replica is about to end and takes nothing new. An ingress asks another one."""

    code = "replica_draining"


class EngineError(SgrayError):
    """The engine failed while it worked on this request."""

    status = 500
    code = "engine_error"


class DeviceLostError(EngineError):
    """The device reported a fault, after which a process can compute nothing more on it."""

    code = "device_lost"


class StorageError(SgrayError):
    """What is kept on disk could not be read or written."""

    status = 500
    code = "storage_error"


class ConfigError(SgrayError):
    """The configuration, the model directory or a command line is wrong; raised before anything starts."""

    status = 500
    type = "configuration_error"


class ModelLoadError(ConfigError):
    """A model directory or checkpoint is missing something, damaged, or of a kind that is not supported."""
