"""Errors as answers."""

from __future__ import annotations

import pytest

from sgray import errors
from sgray.errors import ConfigError, InvalidRequestError, OverloadedError, SgrayError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SgrayError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_body_in_openais_shape(kind: type[SgrayError]) -> None:
    error = kind("what and why", param="x")
    body = error.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["message"], body["param"], str(error)) == ("what and why", "x", "what and why")
    assert 400 <= error.status < 600 and body["type"] and kind.__doc__


def test_a_code_can_be_given() -> None:
    assert InvalidRequestError("m", code="c").body()["error"]["code"] == "c"
    assert InvalidRequestError("m").code is None and InvalidRequestError.code is None


def test_the_clients_fault_is_400_and_ours_is_500() -> None:
    assert all(400 <= kind.status < 500 for kind in KINDS if issubclass(kind, InvalidRequestError))
    assert ConfigError("m").status == 500
    assert OverloadedError("m").status == 503 and OverloadedError.retry_after_s >= 1
