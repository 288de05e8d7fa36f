"""A scripted backend, and the app over it with the model's own tokenizer: text and HTTP are real, tokens are chosen."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.errors import SgrayError
from sgray.protocol import NO_LOGPROBS, Delta, EngineInfo, Finish, Load, Request, TokenLogprobs
from sgray.serve.openai.app import create_app
from sgray.serve.routing.history import History
from sgray.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from loop_backend import LoopBackend

MODEL = "smollm2-135m-instruct"
INFO = EngineInfo(
    model_name=MODEL,
    model_dir="",
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    vocab_size=49152,
    context_length=8192,
    end_ids=(2,),
    page_size=16,
    num_pages=1024,
    max_running_requests=64,
)


@dataclass
class ScriptedBackend:
    """Draws the token that `logit_bias` favours most, else the ids of `script` in turn; stops as an engine does."""

    info: EngineInfo = INFO
    script: list[int] = field(default_factory=lambda: [28, 253, 905])
    width: int = 1
    pause_s: float = 0.0
    fail_after: int | None = None
    failure: SgrayError | Finish | None = None
    is_ready: bool = True
    cached_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    num_drawn: int = 0
    stopped: list[str | None] = field(default_factory=list)
    flushed: int = 0
    holders: list[str] = field(default_factory=list)
    history: History = field(default_factory=History)
    ended: list[str] = field(default_factory=list)

    def end_programs(self, programs: Sequence[str]) -> None:
        self.ended += programs

    def abort_calls(self, name: str | None) -> None:
        self.stopped.append(name)

    async def flush(self) -> list[str]:
        self.flushed += 1
        return self.holders

    def ready(self) -> bool:
        return self.is_ready

    def loads(self) -> Mapping[str, Load]:
        return {"replica-1": Load(running=len(self.running), total_pages=1024, leased_pages=512, prompt_tokens=4)}

    async def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.history.placed(request.id, "replica-1", len(request.tokens), 0)
        self.running.add(request.id)
        is_done = False
        try:
            async for delta in self._deltas(request):
                is_done = delta.finish is not None
                yield delta
        finally:
            self.running.discard(request.id)
            if not is_done:
                self.aborted.append(request.id)

    async def _deltas(self, request: Request) -> AsyncIterator[Delta]:
        tokens, finish = self._draw(request)
        wants_logprobs = request.sampling.logprobs != NO_LOGPROBS
        wants_prompt = request.sampling.prompt_logprobs != NO_LOGPROBS
        for start in range(0, len(tokens), self.width):
            await asyncio.sleep(self.pause_s)
            if self.fail_after is not None and start >= self.fail_after:
                if isinstance(self.failure, Finish):
                    yield Delta(request.id, finish=self.failure)
                    return
                assert self.failure is not None
                raise self.failure
            part = tokens[start : start + self.width]
            self.num_drawn += len(part)
            yield Delta(
                request.id,
                part,
                [logprobs_of(token, request) for token in part] if wants_logprobs else None,
                finish if start + self.width >= len(tokens) else None,
                self.cached_tokens if start == 0 else None,
                prompt_logprobs_of(request) if wants_prompt and start == 0 else None,
            )

    def _draw(self, request: Request) -> tuple[list[int], Finish]:
        sampling = request.sampling
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.info.end_ids)}
        forced = max(sampling.logit_bias, key=lambda token: sampling.logit_bias[token], default=None)
        tokens: list[int] = []
        while len(tokens) < sampling.max_new_tokens:
            token = self.script[len(tokens) % len(self.script)] if forced is None else forced
            if token in ends and len(tokens) < sampling.min_new_tokens:
                token = 28
            tokens.append(token)
            if token in ends:
                return tokens, Finish("stop", matched=token)
        return tokens, Finish("length")


def logprobs_of(token: int, request: Request) -> TokenLogprobs:
    """Alternatives in a fixed pattern: the token, another, and one that is impossible; the ids asked for by number."""
    of_ids = [-float(asked) for asked in request.sampling.logprob_ids]
    return TokenLogprobs(-0.25, [(token, -0.25), (token + 1, -1.5), (token + 2, float("-inf"))], of_ids)


def prompt_logprobs_of(request: Request) -> list[TokenLogprobs | None]:
    """None for the first token and for those before the start asked for, as of an engine."""
    known = max(1, request.sampling.prompt_logprobs_start)
    return [None] * known + [logprobs_of(token, request) for token in request.tokens[known:]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def make_app(tokenizer: Tokenizer, backend: ScriptedBackend) -> Callable[..., Starlette]:
    """The app with some leaves of the `api` section set."""

    def make(**api: Any) -> Starlette:
        return create_app(Config.parse({"api": api}), tokenizer, backend)

    return make


@pytest.fixture
def app(make_app: Callable[..., Starlette]) -> Starlette:
    return make_app()


@pytest.fixture
def http(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
def client(http: httpx.AsyncClient) -> AsyncOpenAI:
    """The real OpenAI client on the app."""
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


class Api:
    """Short ways to call the app."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    def body(self, path: str, **changes: Any) -> dict[str, Any]:
        """A good body of a route, with changes; `...` leaves the field out."""
        base: dict[str, Any] = {
            "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
            "/v1/completions": {"model": MODEL, "prompt": "Hello world", "max_tokens": 4},
            "/generate": {"text": "Hello world", "sampling_params": {"max_new_tokens": 4}},
        }[path]
        return {name: value for name, value in (base | changes).items() if value is not ...}

    def force(self, token: int) -> dict[str, Any]:
        """The fields that make `token` by far the likeliest at every step."""
        return {"logit_bias": {str(token): 100}, "temperature": 0}

    async def post(self, path: str, **changes: Any) -> httpx.Response:
        """Send a good body with changes; Python's JSON also writes what JSON does not have, such as NaN."""
        raw = json.dumps(self.body(path, **changes))
        return await self.http.post(path, content=raw, headers={"content-type": "application/json"})

    async def events(self, path: str, **changes: Any) -> list[Any]:
        """The JSON of the events of a stream that ends well, without the end mark."""
        response = await self.post(path, stream=True, **changes)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def answer(self, path: str, **changes: Any) -> Any:
        """The JSON of a whole answer."""
        response = await self.post(path, **changes)
        assert response.status_code == 200, response.text
        return json.loads(response.text, parse_constant=_refuse_constant)

    async def refused(self, path: str, status: int = 400, **changes: Any) -> dict[str, Any]:
        """The error object of a call that must fail, whether streamed or not."""
        found = []
        for stream in (False, True):
            response = await self.post(path, **({"stream": stream} | changes))
            assert response.status_code == status, response.text
            assert response.headers["content-type"] == "application/json"
            found.append(response.json()["error"])
            assert set(found[-1]) == {"message", "type", "param", "code"}
            assert "pydantic" not in found[-1]["message"].lower()
        assert found[0] == found[1]
        return found[0]

    async def texts(self, path: str, **changes: Any) -> tuple[str, str]:
        """The text of choice 0, streamed and whole, with its finish reason before it: "stop:text"."""
        whole = (await self.answer(path, **changes))["choices"][0]
        text = whole["text"] if "text" in whole else whole["message"]["content"]
        streamed, reason = "", ""
        for choice in [choice for event in await self.events(path, **changes) for choice in event["choices"]]:
            streamed += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reason = choice["finish_reason"] or reason
        return f"{whole['finish_reason']}:{text}", f"{reason}:{streamed}"


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 49152,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def start_tiny(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Callable[[], LoopBackend]]:
    """Starts real engines over a model of one small layer and random weights, with the default model's vocabulary."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    values = {
        "model": {
            "model_path": str(directory),
            "tokenizer_path": str(model_dir),
            "load_format": "dummy",
            "device": "cpu",
            "dtype": "float32",
        },
        "memory": {"max_total_tokens": 4096},
    }
    started: list[LoopBackend] = []

    def start() -> LoopBackend:
        started.append(LoopBackend(Engine.load(Config.parse(values))))
        started[-1].loop.start()
        return started[-1]

    yield start
    for backend in started:
        backend.loop.stop()


@pytest.fixture(scope="module")
def tiny_backend(start_tiny: Callable[[], LoopBackend]) -> LoopBackend:
    """One of them."""
    return start_tiny()


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def api(http: httpx.AsyncClient) -> Api:
    return Api(http)
