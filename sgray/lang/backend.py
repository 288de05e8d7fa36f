"""What a program asks of whoever generates, and the event loop that its requests run on.

A backend owns one loop in one thread, started when first used; all programs on the backend share it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sgray.lang.choices import Entry
from sgray.lang.errors import WouldBlockError
from sgray.lang.expressions import Sampling
from sgray.lang.transcript import Prompt

ResultT = TypeVar("ResultT")
OnText = Callable[[str], None]


@dataclass(frozen=True)
class Completion:
    """The texts of one generation, as many as `n`, each with the facts about it."""

    texts: list[str]
    meta_info: list[dict[str, Any]]


@dataclass(frozen=True)
class ChoiceScores:
    """For each choice the entries [logprob, token id, text] of its tokens, after the prompt and on their own."""

    conditional: list[list[Entry]]
    unconditional: list[list[Entry]] | None = None


class Backend(Protocol):
    """Generates. Coroutines run on `loop` alone; cancelling one stops the work that it has asked for."""

    @property
    def loop(self) -> LoopThread:
        """Where requests run."""
        ...

    async def complete(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None, program: str = ""
    ) -> Completion:
        """Go on from a prompt, as a part of a program. `on_text` gets the pieces of the first text as they come."""
        ...

    async def score_choices(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool, program: str = ""
    ) -> ChoiceScores:
        """What the model thinks of each choice as the continuation of a prompt, in one call."""
        ...

    async def prefetch(self, prompt: Prompt, program: str) -> None:
        """Have a prompt in the prefix cache, where that is possible; whoever goes on from it finds it there."""
        ...

    def end_program(self, program: str) -> None:
        """Nobody will come back to what this program's requests have left in the cache. For any thread."""
        ...

    async def render(self, prompt: Prompt) -> str:
        """The prompt as the text that the model reads."""
        ...

    async def flush(self) -> bool:
        """Empty the prefix cache; False where that was not possible."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """Facts about whoever generates."""
        ...

    def close(self) -> None:
        """End what still runs; nothing is left of this backend in the process."""
        ...


@dataclass
class _Running:
    """What the thread needs; it does not know the object that started it, so that this one can be collected."""

    loop: asyncio.AbstractEventLoop
    at_end: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def run(self) -> None:
        """The thread: the loop until it is stopped, then everything is put away."""
        asyncio.set_event_loop(self.loop)
        self.loop.set_default_executor(ThreadPoolExecutor(1, "sgray-lang-work"))
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._put_away())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def _put_away(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for close in reversed(self.at_end):
            await close()


class LoopThread:
    """An event loop in a daemon thread. It starts with the first use and ends with `close`, or when nobody holds it."""

    def __init__(self, name: str = "sgray-lang") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.start())

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon."""
        self.start().call_soon_threadsafe(function)

    def tell(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon, if the loop runs; it is not started for that."""
        with self._lock:
            if self._running is not None and not self._running.loop.is_closed():
                self._running.loop.call_soon_threadsafe(function)

    def wait(self, future: Future[ResultT]) -> ResultT:
        """The result of work that runs on the loop; raises WouldBlockError on the loop itself."""
        if not future.done() and self.is_current:
            raise WouldBlockError(
                "this would wait on the event loop that brings the value; in an async program use `await s.get(name)` "
                "and `await s.wait()`"
            )
        return future.result()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the loop and wait for it."""
        if self.is_current:
            work.close()
            raise WouldBlockError("this waits for the event loop that it is called on; use the async form")
        return self.submit(work).result()

    @property
    def is_current(self) -> bool:
        """Whether this is called on the loop's thread."""
        return self._thread is threading.current_thread()

    @property
    def ident(self) -> int:
        """The loop's thread."""
        self.start()
        assert self._thread is not None and self._thread.ident is not None
        return self._thread.ident

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close()` on the loop before it ends. The last one given comes first."""
        self.start()
        assert self._running is not None
        self._running.at_end.append(close)

    def start(self) -> asyncio.AbstractEventLoop:
        """The loop, which runs from now on."""
        with self._lock:
            if self._running is None:
                running = _Running(asyncio.new_event_loop())
                self._running = running
                self._thread = threading.Thread(target=running.run, name=self._name, daemon=True)
                self._finalizer = weakref.finalize(self, _stop, running.loop)
                self._thread.start()
            return self._running.loop

    def close(self) -> None:
        """Cancel what runs, end the thread and wait for it. The next use starts another one."""
        with self._lock:
            thread, finalizer = self._thread, self._finalizer
            self._running = self._thread = self._finalizer = None
        if finalizer is not None:
            finalizer()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
