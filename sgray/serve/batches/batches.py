"""The batch API's store and runner over the calls of a service: what a configuration asks for, made and ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgray.config import Config
from sgray.errors import ConfigError
from sgray.serve.batches.runner import Pace, Runner
from sgray.serve.batches.store import Store
from sgray.serve.openai.service import OpenAIService

MAX_FILES = 50
"""All uploads together may have so many times the bytes of the largest one allowed."""


class Batches:
    """A store, and the runner that works on it. Nothing runs before `start`."""

    def __init__(self, store: Store, runner: Runner) -> None:
        self.store = store
        self._runner = runner

    @classmethod
    def over(cls, service: OpenAIService, config: Config) -> Batches | None:
        """As configured; None where there is no directory. Raises ConfigError where it cannot hold the database."""
        options = config.batches
        directory = batches_directory(config)
        if directory is None:
            return None
        store = Store(directory, max_bytes=MAX_FILES * options.max_batch_bytes)
        calls = {
            "/v1/chat/completions": service.chat,
            "/v1/completions": service.completions,
            "/v1/responses": service.responses,
        }

        async def ask(endpoint: str, body: dict[str, Any]) -> Any:
            return await calls[endpoint](body)

        def has_slack() -> bool:
            loads = service.backend.loads().values()
            return not loads or any(load.waiting == 0 for load in loads)

        pace = Pace(options.max_batch_rows_in_flight)
        return cls(store, Runner(store, ask, has_slack, config, pace))

    def start(self) -> None:
        """Begin to work on batches, unless it does already, and look for work now."""
        self._runner.start()

    async def close(self) -> None:
        """Stop the work, which another process or the next start goes on with."""
        await self._runner.close()
        self.store.close()


def batches_directory(config: Config) -> Path | None:
    """Where batches are kept, if anywhere. Raises ConfigError for a place that is another one in each process."""
    given = config.batches.batches_dir
    if given is None:
        return None
    directory = Path(given).expanduser()
    if not directory.is_absolute():
        raise ConfigError(f"batches.batches_dir: {given!r} is not absolute, and processes start in other directories")
    return directory
