"""One engine in this process for all tests of the language, and a server over the same engine.

Also lets the tests of this directory import from `tests/support`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

import sgray as sgl
from sgray.serve.openai.app import create_app

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


@pytest.fixture(scope="session")
def engine(model_dir: Path) -> Iterator[sgl.Engine]:
    """The small model, for what it says."""
    with sgl.Engine(
        model_path=str(model_dir),
        served_model_name="small",
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_total_tokens=16_384,
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def toy(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sgl.Engine]:
    """A model of the same words that is next to nothing, with random weights: for what does not depend on the words."""
    directory = tmp_path_factory.mktemp("toy")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_dir / name, directory)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    values = json.loads((model_dir / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | sizes | heads))
    with sgl.Engine(
        str(directory), load_format="dummy", device="cpu", dtype="float32", num_threads=1, max_total_tokens=16_384
    ) as toy:
        yield toy


@pytest.fixture(scope="session")
def url(engine: sgl.Engine) -> Iterator[str]:
    """A real server whose requests the same engine answers."""
    app = create_app(engine.config, engine.tokenizer, engine.local)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off"))

    async def started() -> int:
        while not server.started:
            await asyncio.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[1]

    running = engine.loop.submit(server.serve())
    yield f"http://127.0.0.1:{engine.loop.run(started())}"
    server.should_exit = True
    running.result(timeout=30)


@pytest.fixture
def endpoint(url: str) -> Iterator[sgl.RuntimeEndpoint]:
    endpoint = sgl.RuntimeEndpoint(url)
    yield endpoint
    endpoint.close()


@pytest.fixture
def openai(url: str) -> Iterator[sgl.OpenAI]:
    client = sgl.OpenAI("small", base_url=f"{url}/v1", api_key="none")
    yield client
    client.close()


@pytest.fixture
def small(engine: sgl.Engine) -> Iterator[sgl.Engine]:
    """The small model as the default of programs."""
    sgl.set_default_backend(engine)
    yield engine
    sgl.set_default_backend(None)


@pytest.fixture
def backend(toy: sgl.Engine) -> Iterator[sgl.Engine]:
    """The toy as the default of programs."""
    sgl.set_default_backend(toy)
    yield toy
    sgl.set_default_backend(None)
