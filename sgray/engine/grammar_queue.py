"""Grammars on their way to the sequences that wait for them: off the engine's thread, bounded, each compiled once.

Knows neither slots nor steps. Refusals are kept as well, so a bad grammar that comes again costs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import NoneType

from sgray.config import GrammarConfig
from sgray.engine.grammar import Codec, CompiledGrammar, Compiler, unusable
from sgray.engine.grammar_trial import TrialProcess
from sgray.errors import EngineError, InvalidRequestError, SgrayError
from sgray.protocol import Grammar, GrammarKind

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_KEPT = 512
MAX_KEPT_BYTES = 256 * 2**20

Key = tuple[GrammarKind, str]


class Workshop:
    """What compiling takes: codec, compiler and the process for trials; made when they are first needed."""

    def __init__(self, load: Callable[[], Codec], limit_s: float) -> None:
        self._load = load
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._codec: Codec | None = None
        self._compiler: Compiler | None = None
        self._trials: TrialProcess | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises the SgrayError that says why not."""
        compiler, trials = self.prepare()
        trials.check(grammar)
        return compiler.compile(grammar)

    def prepare(self) -> tuple[Compiler, TrialProcess]:
        """Take the seconds that the first grammar would have to wait."""
        with self._lock:
            if self._codec is None:
                self._codec = self._load()
            if self._trials is not None and not self._trials.is_alive:
                self._trials.close()
                self._trials = None
            if self._trials is None:
                self._trials = TrialProcess(self._codec.vocabulary, self._limit_s)
            if self._compiler is None:
                self._compiler = Compiler(self._codec.vocabulary, self._codec.encode)
            return self._compiler, self._trials

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._trials is not None:
                self._trials.close()
                self._trials = None


class GrammarQueue:
    """Compiles for requests by id. All methods are for the engine's thread, but for `prepare`.

    `wake` is called on another thread whenever something was done.
    """

    def __init__(self, load: Callable[[], Codec], config: GrammarConfig) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._max_source_bytes = config.max_source_bytes
        self._workshop = Workshop(load, config.compile_timeout_s)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="sgray-grammar")
        self._kept: OrderedDict[Key, Future[CompiledGrammar]] = OrderedDict()
        self._waiting: dict[str, Future[CompiledGrammar]] = {}
        self._done: deque[str] = deque()
        self._something = threading.Event()
        weakref.finalize(self, _close, self._workshop, self._pool)

    @classmethod
    def of_tokenizer(
        cls, directory: Callable[[], Path], vocab_size: int, end_ids: tuple[int, ...], config: GrammarConfig
    ) -> GrammarQueue:
        """For a model whose tokenizer is in a directory."""
        return cls(lambda: Codec.load(directory(), vocab_size, end_ids), config)

    def prepare(self) -> None:
        """Do what the first grammar would have to wait for."""
        self._workshop.prepare()

    @property
    def has_done(self) -> bool:
        """Whether `take` has something."""
        return bool(self._done)

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError for what is not even tried."""
        try:
            num_bytes = len(grammar.source.encode())
        except UnicodeEncodeError:
            raise unusable(grammar.kind, "it is not valid Unicode text") from None
        if num_bytes > self._max_source_bytes:
            limit = f"at most {self._max_source_bytes} are accepted (grammar.max_source_bytes)"
            raise unusable(grammar.kind, f"it has {num_bytes} bytes; {limit}")

    def submit(self, request_id: str, grammar: Grammar) -> None:
        """Have a grammar compiled; `take` tells when it is done."""
        key = (grammar.kind, grammar.source)
        future = self._kept.get(key)
        if future is None or _is_accident(future):
            future = self._kept[key] = self._pool.submit(_compile, self._workshop, grammar)
        self._kept.move_to_end(key)
        self._evict()
        self._waiting[request_id] = future
        queue = weakref.ref(self)
        future.add_done_callback(lambda _: _tell(queue, request_id))

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(request_id, None)

    def clear(self) -> None:
        """Nobody waits for anything any more."""
        self._waiting.clear()

    def take(self) -> list[tuple[str, CompiledGrammar | SgrayError]]:
        """What was done since the last call, for those that still wait."""
        taken: list[tuple[str, CompiledGrammar | SgrayError]] = []
        self._something.clear()
        while self._done:
            request_id = self._done.popleft()
            future = self._waiting.get(request_id)
            if future is not None and future.done():  # else it was cancelled, and may be waiting for another one now
                del self._waiting[request_id]
                taken.append((request_id, _outcome(future)))
        return taken

    def wait(self, timeout_s: float) -> None:
        """Block until something is done, for callers that have nothing else to do."""
        self._something.wait(timeout_s)

    def note(self, request_id: str) -> None:
        """A compile has ended, well or not; from any thread."""
        self._done.append(request_id)
        self._something.set()
        self.wake()

    def _evict(self) -> None:
        """Forget what was used longest ago, where it is too many or too much; nothing under way."""
        sizes = {key: _num_bytes(future) for key, future in self._kept.items()}
        total = sum(sizes.values())
        for key in list(self._kept)[:-1]:
            if len(self._kept) <= MAX_KEPT and total <= MAX_KEPT_BYTES:
                return
            if self._kept[key].done():
                del self._kept[key]
                total -= sizes[key]


def _compile(workshop: Workshop, grammar: Grammar) -> CompiledGrammar:
    try:
        return workshop.compile(grammar)
    except SgrayError:
        raise
    except Exception:  # whatever it is, it is the end of this request alone
        logger.exception("a grammar could not be compiled")
        raise EngineError("the grammar could not be compiled") from None


def _outcome(future: Future[CompiledGrammar]) -> CompiledGrammar | SgrayError:
    error = future.exception()
    if error is None:
        return future.result()
    assert isinstance(error, SgrayError), error
    return error


def _is_accident(future: Future[CompiledGrammar]) -> bool:
    """Whether it failed for no fault of the grammar's, so that another try may succeed."""
    return future.done() and not isinstance(future.exception(), (InvalidRequestError, NoneType))


def _num_bytes(future: Future[CompiledGrammar]) -> int:
    return future.result().num_bytes if future.done() and future.exception() is None else 0


def _tell(queue: weakref.ref[GrammarQueue], request_id: str) -> None:
    if (there := queue()) is not None:
        there.note(request_id)


def _close(workshop: Workshop, pool: ThreadPoolExecutor) -> None:
    with contextlib.suppress(Exception):
        workshop.close()
    pool.shutdown(wait=False, cancel_futures=True)
