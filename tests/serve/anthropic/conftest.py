"""The scripted backend and the app of OpenAI's tests, for Anthropic's routes on the same app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import pytest
from conftests import openai_fixtures
from starlette.applications import Starlette

_openai = openai_fixtures()
anyio_backend, backend, make_app, http = _openai.anyio_backend, _openai.backend, _openai.make_app, _openai.http


@pytest.fixture
def app(make_app: Callable[..., Starlette]) -> Starlette:
    return make_app(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def says(backend: Any, tokenizer: Any) -> Callable[[str], None]:
    """Makes the model write a text and end."""

    def script(text: str) -> None:
        backend.script = [*tokenizer.encode(text), *backend.info.end_ids]

    return script


def client_of(app: Starlette, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's own client on an app."""
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test")
    options = {"api_key": "none", "max_retries": 0} | options
    return anthropic.AsyncAnthropic(base_url="http://test", http_client=transport, **options)


@pytest.fixture
def on() -> Callable[..., anthropic.AsyncAnthropic]:
    """Anthropic's own client on whatever app."""
    return client_of


@pytest.fixture
def client(app: Starlette) -> anthropic.AsyncAnthropic:
    """Anthropic's own client on the app."""
    return client_of(app)
