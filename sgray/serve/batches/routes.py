"""The HTTP handlers of files and batches: bodies and queries in, OpenAI's objects out. They keep nothing themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sgray.config import Config
from sgray.errors import NotFoundError
from sgray.serve.batches.batches import Batches
from sgray.serve.batches.shapes import (
    BATCHES_LISTED,
    MAX_BATCHES_LISTED,
    MAX_FILES_LISTED,
    MAX_NAME_CHARS,
    MAX_PAIRS,
    MAX_VALUE_CHARS,
    WINDOWS,
    BatchBody,
    batch_json,
    file_json,
    list_json,
)
from sgray.serve.batches.uploads import read_upload
from sgray.serve.openai.http import json_response, read_json
from sgray.serve.openai.operations import Entry
from sgray.serve.openai.validate import checked_text, parse_body, shown, wrong_type, wrong_value


class BatchCalls:
    """The handlers of the routes; without `batches` each says that the batch API is off."""

    def __init__(self, batches: Batches | None, config: Config) -> None:
        self._given = batches
        self._api = config.api
        self._max_bytes = config.batches.max_batch_bytes

    async def create_file(self, request: Request) -> Response:
        store = self._batches.store
        upload = await read_upload(request, self._max_bytes)
        try:
            file = await asyncio.to_thread(store.add_file, upload.filename, upload.parts(), keep_s=upload.keep_s)
        finally:
            upload.close()
        return json_response(file_json(file))

    async def files(self, request: Request) -> Response:
        query, store = request.query_params, self._batches.store
        limit = _limit(query.get("limit"), MAX_FILES_LISTED, MAX_FILES_LISTED)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            wrong_value("order", "order", f"{shown(order)} is not 'asc' or 'desc'.")
        found, has_more = await asyncio.to_thread(
            store.files,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=limit,
            newest_first=order == "desc",
        )
        return json_response(list_json([file_json(file) for file in found], has_more=has_more))

    async def file(self, request: Request) -> Response:
        return json_response(file_json(await asyncio.to_thread(self._batches.store.file, _id(request))))

    async def file_content(self, request: Request) -> Response:
        """The bytes of a file, as they are read from the store."""
        parts = await asyncio.to_thread(self._batches.store.content, _id(request))
        return StreamingResponse(_in_threads(parts), media_type="application/octet-stream")

    async def delete_file(self, request: Request) -> Response:
        await asyncio.to_thread(self._batches.store.delete_file, _id(request))
        return json_response({"id": _id(request), "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        store = self._batches.store
        body = await read_json(request, self._api.max_body_bytes, self._api.max_json_depth)
        given, kept = parse_body(BatchBody, body), None
        if given.output_expires_after is not None:
            kept = given.output_expires_after.seconds
        batch = await asyncio.to_thread(
            store.add_batch,
            checked_text("input_file_id", "input_file_id", given.input_file_id),
            given.endpoint,
            window=given.completion_window,
            window_s=WINDOWS[given.completion_window],
            metadata=_metadata(given.metadata),
            output_seconds=kept,
        )
        self._batches.start()
        return json_response(batch_json(batch))

    async def batches(self, request: Request) -> Response:
        query, store = request.query_params, self._batches.store
        limit = _limit(query.get("limit"), BATCHES_LISTED, MAX_BATCHES_LISTED)
        found, has_more = await asyncio.to_thread(store.batches, after=query.get("after"), limit=limit)
        return json_response(list_json([batch_json(batch) for batch in found], has_more=has_more))

    async def batch(self, request: Request) -> Response:
        return json_response(batch_json(await asyncio.to_thread(self._batches.store.batch, _id(request))))

    async def cancel_batch(self, request: Request) -> Response:
        """The batch as it is now; it is cancelled when its rows in flight have been stopped."""
        return json_response(batch_json(await asyncio.to_thread(self._batches.store.cancel, _id(request))))

    @property
    def _batches(self) -> Batches:
        if self._given is None:
            raise NotFoundError(
                "The batch API is off: this server was given no directory for it (batches.batches_dir, --batches-dir).",
                code="batches_off",
            )
        return self._given


BATCH_ROUTES = (
    Entry("POST", "/v1/files", BatchCalls.create_file),
    Entry("GET", "/v1/files", BatchCalls.files),
    Entry("GET", "/v1/files/{file_id}", BatchCalls.file),
    Entry("DELETE", "/v1/files/{file_id}", BatchCalls.delete_file),
    Entry("GET", "/v1/files/{file_id}/content", BatchCalls.file_content),
    Entry("POST", "/v1/batches", BatchCalls.create_batch),
    Entry("GET", "/v1/batches", BatchCalls.batches),
    Entry("GET", "/v1/batches/{batch_id}", BatchCalls.batch),
    Entry("POST", "/v1/batches/{batch_id}/cancel", BatchCalls.cancel_batch),
)
"""Every route of the batch API. Keys are checked before any of them, as for all routes."""


def _id(request: Request) -> str:
    (name,) = request.path_params.values()
    return str(name)


def _limit(value: str | None, default: int, most: int) -> int:
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= most):
        wrong_value("limit", "limit", f"{shown(value)} is not a number in 1..{most}.")
    return int(value)


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        wrong_type("metadata", "metadata", "an object", given)
    if len(given) > MAX_PAIRS:
        wrong_value("metadata", "metadata", f"at most {MAX_PAIRS} pairs are allowed.")
    for name, value in given.items():
        place = f"metadata.{shown(name)[1:-1]}"
        if len(checked_text("metadata", "metadata", name)) > MAX_NAME_CHARS:
            wrong_value("metadata", place, f"a name has at most {MAX_NAME_CHARS} characters.")
        if len(checked_text("metadata", place, value)) > MAX_VALUE_CHARS:
            wrong_value("metadata", place, f"a text of at most {MAX_VALUE_CHARS} characters is allowed.")
    return dict(given)


async def _in_threads(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same parts, each read off the event loop."""
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part
