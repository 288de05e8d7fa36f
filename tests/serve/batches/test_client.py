"""The official client and the batch API, over a real engine or one that is scripted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
from batch_rows import MODEL, client_of, jsonl, row

from sgray.config import Config
from sgray.errors import EngineError, OverloadedError
from sgray.protocol import Load
from sgray.serve.batches.runner import LOWEST_PRIORITY
from sgray.serve.batches.store import Store
from sgray.serve.openai.app import create_app

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_a_batch_on_an_engine_answers_good_rows_and_says_what_is_wrong_with_others(run, tiny_backend):
    async def test(caller) -> None:
        rows = [row(f"good {number}", f"Text {number}") for number in range(20)]
        rows[5:5] = [row("no model", model="other"), row("too hot", temperature=9)]
        batch = await caller.create(rows, metadata={"kind": "test"})
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"kind": "test"})
        batch = await caller.ended(batch.id)
        assert batch.status == "completed" and batch.errors is None
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == batch.created_at + 86_400
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (22, 20, 2)
        lines = await caller.lines(batch.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"good {number}" for number in range(20)]
        assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines)
        assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines} <= {1, 2}
        errors = {line["custom_id"]: line["response"] for line in await caller.lines(batch.error_file_id)}
        assert (errors["no model"]["status_code"], errors["too hot"]["status_code"]) == (404, 400)
        assert errors["too hot"]["body"]["error"]["param"] == "temperature"
        output = await caller.client.files.retrieve(batch.output_file_id)
        content = (await caller.client.files.content(output.id)).content
        assert (output.purpose, output.bytes) == ("batch_output", len(content))

    run(tiny_backend, test)


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, "chat.completion"),
        ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 4}, "response"),
    ],
)
def test_rows_are_calls_of_their_endpoint_at_the_lowest_priority(run, backend, endpoint, body, kind):
    async def test(caller) -> None:
        rows = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}]
        batch = await caller.ended((await caller.create(rows, endpoint)).id)
        (line,) = await caller.lines(batch.output_file_id)
        assert line["response"]["body"]["object"] == kind
        assert [request.priority for request in backend.requests] == [LOWEST_PRIORITY]

    run(backend, test)


def test_a_faulty_file_fails_the_batch_and_names_every_line(run, backend):
    rows = [
        row("a"),
        "{",
        row("a"),
        {**row("b"), "custom_id": None},
        {**row("c"), "method": "GET"},
        {**row("d"), "url": "/v1/embeddings"},
        row("e", stream=True),
        row("f", priority=5),
        "[]",
        {**row("g"), "body": "x"},
        {**row("h"), "extra": 1},
        {**row("i"), "custom_id": "x" * 513},
        {**row("j"), "custom_id": "\ud800"},
    ]

    async def test(caller) -> None:
        batch = await caller.ended((await caller.create(rows)).id)
        assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
        assert [(fault.line, fault.code, fault.param) for fault in batch.errors.data] == [
            (2, "invalid_json_line", None),
            (3, "duplicate_custom_id", "custom_id"),
            (4, "missing_required_parameter", "custom_id"),
            (5, "invalid_method", "method"),
            (6, "invalid_url", "url"),
            (7, "invalid_value", "body.stream"),
            (8, "invalid_value", "body.priority"),
            (9, "invalid_json_line", None),
            (10, "invalid_type", "body"),
            (11, "unknown_parameter", "extra"),
            (12, "invalid_value", "custom_id"),
            (13, "invalid_value", "custom_id"),
        ]
        assert backend.requests == []
        empty = await caller.ended((await caller.create(["", " "])).id)
        assert [fault.code for fault in empty.errors.data] == ["empty_file"]

    run(backend, test)


def test_a_cancelled_batch_keeps_what_it_has(run, backend):
    backend.pause_s = 0.01

    async def test(caller) -> None:
        batch = await caller.create([row(str(number)) for number in range(2000)])
        while not (await caller.client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.02)
        assert (await caller.client.batches.cancel(batch.id)).status == "cancelling"
        assert (await caller.client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await caller.ended(batch.id)
        assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
        assert 0 < batch.request_counts.completed < 2000
        assert len(await caller.lines(batch.output_file_id)) == batch.request_counts.completed
        assert backend.running == set()
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await caller.client.batches.cancel(batch.id)

    run(backend, test)


def test_rows_in_flight_are_bounded(run, backend):
    backend.pause_s = 0.002
    most: list[int] = []

    async def test(caller) -> None:
        batch = await caller.create([row(str(number)) for number in range(40)])
        while (await caller.client.batches.retrieve(batch.id)).status != "completed":
            most.append(len(backend.running))
            await asyncio.sleep(0.001)

    run(backend, test, max_batch_rows_in_flight=3)
    assert max(most) == 3


@pytest.mark.parametrize(("failure", "count"), [(OverloadedError("full"), 0), (EngineError("broken"), 1)])
def test_a_full_server_is_waited_for_and_a_broken_row_is_a_row_of_the_error_file(run, backend, failure, count):
    backend.fail_after, backend.failure = 0, failure

    async def test(caller) -> None:
        batch = await caller.create([row("a")])
        await asyncio.sleep(0.5)
        assert len(backend.requests) >= 3
        backend.fail_after = None
        batch = await caller.ended(batch.id)
        assert (batch.status, batch.request_counts.failed) == ("completed", count)

    run(backend, test)


def test_files_are_listed_page_by_page_and_deleted(run, backend):
    async def test(caller) -> None:
        files = caller.client.files
        made = [await files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in range(1, 6)]
        assert [(file.bytes, file.filename, file.expires_at) for file in made[:2]] == [
            (1, "1.jsonl", None),
            (2, "2.jsonl", None),
        ]
        assert [file.id async for file in await files.list(limit=2)] == [file.id for file in made[::-1]]
        assert [file.id async for file in await files.list(order="asc")] == [file.id for file in made]
        assert (await files.content(made[2].id)).content == b"xxx"
        assert (await files.delete(made[2].id)).deleted
        for call in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await call(made[2].id)
        kept = await files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
        assert kept.expires_at == kept.created_at + 3600
        batches = [await caller.create([row("a")]) for _ in range(3)]
        assert [one.id async for one in await caller.client.batches.list(limit=2)] == [one.id for one in batches[::-1]]

    run(backend, test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"extra_body": {"unheard": 1}}, "unheard"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_its_field(run, backend, fields, param):
    async def test(caller) -> None:
        file = await caller.client.files.create(file=jsonl([row("a")]), purpose="batch")
        good: dict[str, Any] = {
            "input_file_id": file.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        with pytest.raises(openai.BadRequestError) as caught:
            await caller.client.batches.create(**good | fields)
        assert caught.value.param == param

    run(backend, test)


def test_uploads_are_bounded_and_explained(run, backend):
    async def test(caller) -> None:
        files = caller.client.files
        with pytest.raises(openai.APIStatusError) as caught:
            await files.create(file=b"x" * 1025, purpose="batch")
        assert caught.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as caught:
            await files.create(file=b"x" * 100_000, purpose="batch")
        assert caught.value.status_code == 413
        for _ in range(50):
            await files.create(file=b"x" * 1024, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await files.create(file=b"x", purpose="assistants")
        for sent, words in [
            ({"data": {"purpose": "batch"}}, "multipart"),
            ({"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}, "empty"),
            ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "other"),
            ({"files": {"file": (None, b"x")}, "data": {"purpose": "batch"}}, "with a name"),
            ({"files": {"file": ("a", b"x")}}, "purpose"),
            ({"content": b"zz", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
            ({"content": b"zz", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "form"),
        ]:
            answer = await caller.client._client.post("/v1/files", **sent)
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text

    run(backend, test, max_batch_bytes=1024)


async def _statuses(app: Any, **headers: str) -> set[int]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as http:
        calls = [("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/files"), ("POST", "/v1/batches/a/cancel")]
        return {(await http.request(method, path)).status_code for method, path in calls}


def test_without_a_directory_every_route_says_that_batches_are_off(tokenizer, backend):
    async def test() -> None:
        async with client_of(create_app(Config(), tokenizer, backend)) as client:
            with pytest.raises(openai.NotFoundError, match="--batches-dir"):
                await client.batches.list()
        assert await _statuses(create_app(Config(), tokenizer, backend)) == {404}

    asyncio.run(test())


def test_the_routes_need_a_key_where_the_server_has_keys(tokenizer, backend, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    api, batches = {"api_keys_file": str(tmp_path / "keys")}, {"batches_dir": str(tmp_path / "b")}
    app = create_app(Config.parse({"api": api, "batches": batches}), tokenizer, backend)
    assert asyncio.run(_statuses(app)) == {401}
    assert asyncio.run(_statuses(app, **{"x-api-key": "secret"})) == {200, 400, 404}


def test_no_row_begins_while_every_replica_has_somebody_waiting(run, backend, monkeypatch):
    loads = {"one": Load(waiting=1), "other": Load(waiting=3)}
    monkeypatch.setattr(backend, "loads", lambda: loads)

    async def test(caller) -> None:
        batch = await caller.create([row(str(number)) for number in range(3)])
        await caller.ended(batch.id, "in_progress")
        await asyncio.sleep(0.3)
        assert backend.requests == []
        loads["other"] = Load(running=9)  # busy, but nobody waits there
        batch = await caller.ended(batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)

    run(backend, test)


def test_rows_go_on_where_no_replica_is_known_since_asking_is_what_starts_one(run, backend, monkeypatch):
    monkeypatch.setattr(backend, "loads", dict)

    async def test(caller) -> None:
        assert (await caller.ended((await caller.create([row("a")])).id)).status == "completed"

    run(backend, test)


def test_a_batch_whose_time_is_over_ends_with_what_it_has(run, backend, monkeypatch):
    late = [0.0]
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "now", lambda: time.time() + late[0])
    backend.pause_s = 0.02

    async def test(caller) -> None:
        batch = await caller.create([row(str(number)) for number in range(500)])
        assert batch.expires_at - batch.created_at == 86_400
        while not (await caller.client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.02)
        backend.pause_s, late[0] = 60.0, 86_400.0  # what begins now would not end before the batch
        batch = await caller.ended(batch.id)
        assert batch.status == "expired" and batch.expired_at >= batch.expires_at
        counts = batch.request_counts
        assert 0 < counts.completed < 500 and counts.completed + counts.failed == counts.total == 500
        done, left = await caller.lines(batch.output_file_id), await caller.lines(batch.error_file_id)
        assert {line["error"]["code"] for line in left} == {"batch_expired"}
        assert sorted(int(line["custom_id"]) for line in done + left) == list(range(500))
        assert backend.running == set(), "what was in flight was stopped"
        backend.pause_s = 0.0
        again = await caller.ended((await caller.create([row("next")])).id)
        assert again.status == "completed"

    run(backend, test)
