"""A process that runs the batches of a directory until it is killed, and writes a line for every row it has asked.

The answer of a row is a function of its body, so that whoever reads the output can tell whose answer it is.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from sgray.config import Config
from sgray.serve.batches.runner import Pace, Runner
from sgray.serve.batches.store import Store


async def ask(endpoint: str, body: dict[str, Any]) -> Any:
    """The prompt, backwards."""
    await asyncio.sleep(0.001)
    print(body["prompt"], flush=True)
    return {"object": "text_completion", "choices": [{"text": body["prompt"][::-1]}]}


async def main(directory: Path) -> None:
    """Run for ever."""
    runner = Runner(Store(directory, max_bytes=2**30), ask, lambda: True, Config(), Pace(8, lease_s=0.4, look_s=0.05))
    runner.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
