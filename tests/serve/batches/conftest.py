"""OpenAI's client on an app with batches, over a small real engine or the scripted backend of OpenAI's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from batch_rows import client_of, jsonl
from conftests import openai_fixtures
from openai import AsyncOpenAI

from sgray.config import Config
from sgray.serve.openai.app import create_app

_openai = openai_fixtures()
anyio_backend, backend = _openai.anyio_backend, _openai.backend
start_tiny, tiny_backend = _openai.start_tiny, _openai.tiny_backend


class Caller:
    """Short ways to use the batch API through the client."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self.client = client

    async def create(self, rows: list[Any], endpoint: str = "/v1/completions", **fields: Any) -> Any:
        """A batch of these rows."""
        file = await self.client.files.create(file=("in.jsonl", jsonl(rows)), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
        )

    async def ended(self, name: str, *statuses: str) -> Any:
        """The batch, once it has one of these states."""
        for _ in range(600):
            batch = await self.client.batches.retrieve(name)
            if batch.status in (statuses or ("completed", "failed", "cancelled", "expired")):
                return batch
            await asyncio.sleep(0.02)
        raise AssertionError(batch)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file."""
        assert file_id is not None
        return [json.loads(line) for line in (await self.client.files.content(file_id)).text.splitlines()]


@pytest.fixture
def run(tmp_path: Path, tokenizer: Any) -> Callable[..., None]:
    """Runs a test's coroutine on an app with batches over a backend; the work on batches ends with it."""

    def run_on(backend: Any, test: Callable[[Caller], Awaitable[None]], **batches: Any) -> None:
        values = {"batches": {"batches_dir": str(tmp_path / "batches"), **batches}}

        async def main() -> None:
            app = create_app(Config.parse(values), tokenizer, backend)
            try:
                async with client_of(app) as client:
                    await test(Caller(client))
            finally:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()

        asyncio.run(main())

    return run_on
