"""Rows of batches, and the client that sends them."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai import AsyncOpenAI

MODEL = "smollm2-135m-instruct"


def client_of(app: Any, **options: Any) -> AsyncOpenAI:
    """The real OpenAI client on an app."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    return AsyncOpenAI(base_url="http://test/v1", http_client=http, **{"api_key": "none", "max_retries": 0} | options)


def row(custom_id: str, prompt: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A good row of a completions batch, with other fields in its body."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(rows: list[Any]) -> bytes:
    """Rows as the bytes of a file."""
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in rows).encode()
