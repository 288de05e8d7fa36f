"""Compiles a stranger's grammar where that can do no harm, to learn whether it may be compiled in the engine.

A grammar of a few bytes can take minutes, or all memory, and a call of the compiler cannot be interrupted. So a child
process with the same vocabulary forks for every grammar; the fork compiles it and follows it for some tokens under
limits on time, memory and stack, and dies of what it meets. What survives is compiled again by the engine: that is
several times faster than to carry the result from one process to the other.

Knows processes and pipes; requests and sequences are others' business.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO

import msgspec
import numpy as np

from sgray.engine.grammar import MAX_MESSAGE_CHARS, Compiler, Vocabulary, unusable
from sgray.errors import EngineError, InvalidRequestError
from sgray.protocol import Grammar, GrammarKind

MAX_MEMORY_BYTES = 512 * 2**20  # beyond what the child holds anyway
MAX_STACK_BYTES = 4 * 2**20  # half of what the engine's threads have
WALL_FACTOR = 4  # the limit is on CPU time; on a busy machine that takes longer
NUM_PROBED = 64  # tokens that a trial goes on after compiling
MAX_REPLY_BYTES = 4 * MAX_MESSAGE_CHARS + 4096

_START = "import sys; sys.path[:] = sys.argv[1:]; from sgray.engine.grammar_trial import serve; serve()"


class Hello(msgspec.Struct):
    """The first message to the child: what all trials have in common. `limit_s` is CPU time."""

    pieces: list[bytes]
    end_ids: tuple[int, ...]
    limit_s: float


class Trial(msgspec.Struct):
    """A grammar to try."""

    ticket: int
    kind: GrammarKind
    source: str


class Verdict(msgspec.Struct):
    """How a trial ended: None if the grammar may be used, else why not."""

    ticket: int
    refusal: str | None


class TrialProcess:
    """The child, from the engine's side. Any number of trials may be asked for at once, from any thread."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._pending: dict[int, Future[str | None]] = {}
        self._num_tickets = 0
        self._is_lost = False
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what a dead child has not read must not be in the way of closing
        )
        with contextlib.suppress(OSError):  # a child that has died at once is seen to be dead
            _send(self._stdin.fileno(), msgspec.msgpack.encode(Hello(vocabulary.pieces, vocabulary.end_ids, limit_s)))
        threading.Thread(target=self._read, name="sgray-grammar-trials", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether trials can be asked for. False as soon as one was told that none took place: a process that is about
        to end closes its pipes before it is seen to have ended."""
        return not self._is_lost and self._process.poll() is None

    def check(self, grammar: Grammar) -> None:
        """Wait for a trial. Raises InvalidRequestError if the grammar failed it, EngineError if none took place."""
        verdict: Future[str | None] = Future()
        with self._lock:
            self._num_tickets += 1
            ticket = self._num_tickets
            self._pending[ticket] = verdict
            try:
                if self._is_lost:  # nobody reads what it still might answer
                    raise ValueError
                _send(self._stdin.fileno(), msgspec.msgpack.encode(Trial(ticket, grammar.kind, grammar.source)))
            except (OSError, ValueError):  # it is gone, or closed
                self._pending.pop(ticket, None)
                self._is_lost = True
                raise _lost() from None
        if refusal := verdict.result():
            raise unusable(grammar.kind, refusal)

    def close(self) -> None:
        """End the child."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._process.kill()
        self._process.wait()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read(self) -> None:
        """Pass verdicts on until the child is gone; then nobody waits any more."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while raw := _read(stdout.fileno()):
                verdict = msgspec.msgpack.decode(raw, type=Verdict)
                with self._lock:
                    waiting = self._pending.pop(verdict.ticket)
                waiting.set_result(verdict.refusal)
        with self._lock:
            self._is_lost = True
            left, self._pending = self._pending, {}
        for waiting in left.values():
            waiting.set_exception(_lost())
        self._process.wait()


def serve() -> None:
    """The child's life: a fork for every trial, until the parent is gone."""
    replies = os.dup(1)
    os.dup2(2, 1)  # whatever is printed is no reply
    raw = _read(0)
    if not raw:
        return
    hello = msgspec.msgpack.decode(raw, type=Hello)
    compiler = Compiler(Vocabulary(hello.pieces, hello.end_ids))
    running: dict[int, _Fork] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    selector.unregister(key.fd)
                    _send(replies, msgspec.msgpack.encode(running.pop(key.fd).verdict()))
                elif raw := _read(0):
                    fork = _Fork.start(compiler, msgspec.msgpack.decode(raw, type=Trial), hello.limit_s)
                    running[fork.pipe] = fork
                    selector.register(fork.pipe, selectors.EVENT_READ)
                else:
                    _kill(running)
                    return


@dataclass(frozen=True, slots=True)
class _Fork:
    """A trial under way: its process, and the pipe that ends with it."""

    ticket: int
    process: int
    pipe: int

    @classmethod
    def start(cls, compiler: Compiler, trial: Trial, limit_s: float) -> _Fork:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                _limit(limit_s)
                os.write(writer, _try(compiler, Grammar(trial.kind, trial.source)).encode()[:MAX_REPLY_BYTES])
            finally:
                os._exit(0)
        os.close(writer)
        return cls(trial.ticket, process, reader)

    def verdict(self) -> Verdict:
        """When the pipe has something to say or has ended."""
        said = os.read(self.pipe, MAX_REPLY_BYTES)
        os.close(self.pipe)
        _, status = os.waitpid(self.process, 0)
        if said:
            refusal = said.decode(errors="replace")
            return Verdict(self.ticket, None if refusal == _FINE else refusal)
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        is_late = killed_by in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU)
        return Verdict(
            self.ticket, "it takes too long to compile or to follow" if is_late else "it is too large to compile"
        )


_FINE = "fine"


def _try(compiler: Compiler, grammar: Grammar) -> str:
    """Compile a grammar and follow it for some tokens; what is wrong with it."""
    try:
        matcher = compiler.compile(grammar).start((), frozenset())
        for index in range(NUM_PROBED):
            mask = matcher.mask(frozenset())
            if mask is None:
                break
            matcher.accept(_pick(mask, index))
    except InvalidRequestError as error:
        return str(error.message).split(": ", 1)[-1]
    except MemoryError:
        return "it takes too much memory to compile"
    return _FINE


def _pick(mask: bytes, index: int) -> int:
    """One of the ids of a mask, another one with each index."""
    places = np.flatnonzero(np.frombuffer(mask, dtype=np.uint8))
    place = int(places[index * 7919 % len(places)])
    return 8 * place + (mask[place] & -mask[place]).bit_length() - 1


def _limit(limit_s: float) -> None:
    """Bound what this process may take. Each of these ends it, also in the middle of a foreign call."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    os.dup2(devnull, 1)
    os.nice(5)
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MAX_MEMORY_BYTES, held + MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * limit_s)


def _kill(running: dict[int, _Fork]) -> None:
    for fork in running.values():
        os.kill(fork.process, signal.SIGKILL)
        os.waitpid(fork.process, 0)


def _lost() -> EngineError:
    return EngineError("the process that checks grammars has ended; try again")


def _send(pipe: int, raw: bytes) -> None:
    rest = memoryview(len(raw).to_bytes(4, "little") + raw)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _read(pipe: int) -> bytes:
    """The next message; empty when there will be none."""
    head = _read_exactly(pipe, 4)
    return _read_exactly(pipe, int.from_bytes(head, "little")) if head else b""


def _read_exactly(pipe: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(pipe, count)
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
