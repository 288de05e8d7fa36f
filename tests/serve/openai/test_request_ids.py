"""The request id stands in headers, in logs and in what a client is told of a fault."""

from __future__ import annotations

import json
import logging

import pytest

from sgray.errors import EngineError, OverloadedError

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
ID = {"x-request-id": "trace-7"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_after", [0, 2])
async def test_a_fault_is_logged_and_told_under_the_request_id(api, backend, caplog, stream, fail_after):
    backend.fail_after, backend.failure = fail_after, ZeroDivisionError("inner words")
    response = await api.http.post(PATH, json=api.body(PATH, stream=stream), headers=ID)
    assert response.headers["x-request-id"] == "trace-7"
    last = response.text.split("data: ")[-1] if response.status_code == 200 else response.text
    error = json.loads(last)["error"]
    assert error["code"] == "internal_error" and "trace-7" in error["message"]
    assert "inner words" not in response.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "trace-7" in record.getMessage() and record.exc_info


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_engine_is_logged_under_the_request_id(api, backend, caplog, stream):
    backend.fail_after, backend.failure = 2, EngineError("the step failed")
    await api.http.post(PATH, json=api.body(PATH, stream=stream), headers=ID)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("sgray")] == [
        "request trace-7: 500 engine_error: the step failed"
    ]


async def test_refusals_leave_no_line_each(api, backend, caplog):
    caplog.set_level(logging.INFO, "sgray")
    await api.http.post(PATH, json=api.body(PATH, temperature=9), headers=ID)
    backend.fail_after, backend.failure = 0, OverloadedError("full")
    assert (await api.http.post(PATH, json=api.body(PATH), headers=ID)).status_code == 503
    assert not [record for record in caplog.records if record.name.startswith("sgray")]


async def test_errors_of_every_kind_carry_the_id(api):
    for method, path, content in (("POST", PATH, b"{"), ("GET", "/nothing", b""), ("GET", PATH, b"")):
        response = await api.http.request(method, path, content=content, headers=ID)
        assert response.status_code >= 400 and response.headers["x-request-id"] == "trace-7"
    response = await api.http.get("/live", headers={**ID, "x-padding": "x" * 20_000})
    assert (response.status_code, response.headers["x-request-id"]) == (431, "trace-7")
