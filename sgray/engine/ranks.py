"""The processes of a gang's other ranks, from the side of rank 0: started together, watched together, ended together.

Down a rank's stdin go messages; when that ends, so does the rank. Up its stdout come single bytes: a beat a second, a
mark when it has come to a meeting, and, before it ends, the reason. Nobody answers a message: a rank that no longer
follows is seen by its silence. Knows nothing of what the messages say, nor of torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sgray.errors import DeviceLostError
from sgray.parallel.pipes import send

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 8.0  # with a beat to spare, a gang of which one is stuck is given up within 10 s
CAUSE_S = 1.0  # so long after an effect its cause may still be on the way
END_S = 5.0
MAX_SAID_BYTES = 4096  # which a pipe takes in one piece: a reason is never cut in two
BEAT, MET, FAILED = b".", b"+", b"!"
GO = b"go"

_START = "import sys; sys.path[:] = sys.argv[1:]; from sgray.engine.rank import serve; serve()"


@dataclass(slots=True)
class Child:
    """One process, and what it has told so far: how many meetings it came to, when it was heard, why it failed."""

    number: int
    process: subprocess.Popen[bytes]
    heard: float
    num_met: int = 0
    reason: bytes = b""

    @classmethod
    def start(cls, number: int, hello: bytes) -> Child:
        """The process of a rank, which is told `hello`."""
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what a dead rank has not read must not be in the way of closing
        )
        child = cls(number, process, time.monotonic())
        os.set_blocking(child.stdin, False)
        child.send(hello)
        return child

    @property
    def stdin(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    @property
    def stdout(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, message: bytes) -> None:
        """Raises DeviceLostError where the rank does not take it."""
        try:
            send(self.stdin, message, SILENCE_S)
        except (OSError, ValueError) as error:
            raise DeviceLostError(f"rank {self.number} takes no message: {error}") from error

    def take(self) -> bool:
        """What it says, which is there to be read; False when it ends."""
        said = os.read(self.stdout, MAX_SAID_BYTES)
        self.heard = time.monotonic()
        words, _, self.reason = said.partition(FAILED)
        self.num_met += words.count(MET)
        return bool(words) and not self.reason

    def end(self) -> str:
        """Why it ended, once it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CAUSE_S)
        if self.reason:
            return f"rank {self.number}: {self.reason.decode(errors='replace')}"
        status = self.process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return f"rank {self.number} {how}"

    def close(self) -> None:
        """Kill it and give everything back."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Ranks:
    """One process for each of `hellos`, ranks 1 and up; `fault` says that one of them is lost, and then all are killed.

    Messages, meetings and `close` are one thread's matter, `fault` is anybody's.
    """

    def __init__(self, hellos: Iterable[bytes]) -> None:
        self._changed = threading.Condition()
        self._fault: str | None = None
        self._num_meetings = 0
        self._is_ready = False
        self._is_closed = False
        self._children: list[Child] = []
        try:
            for number, hello in enumerate(hellos, start=1):
                self._children.append(Child.start(number, hello))
        except BaseException:
            for child in self._children:
                child.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="sgray-ranks", daemon=True)
        self._watcher.start()

    @property
    def fault(self) -> str | None:
        """Why there is no gang any more, if so."""
        return self._fault

    @property
    def processes(self) -> list[int]:
        """The ids of the processes, by rank."""
        return [child.process.pid for child in self._children]

    def send(self, message: bytes) -> None:
        """Tell all ranks; DeviceLostError where one cannot be told."""
        for child in self._children:
            child.send(message)

    def meet(self) -> None:
        """Wait until all ranks have come to the meeting that this one comes to. DeviceLostError if one never will."""
        self._num_meetings += 1
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None or self._have_met())
        if self._fault is not None:
            raise DeviceLostError(self._fault)
        self.send(GO)

    def expect_beats(self) -> None:
        """From now on a rank that says nothing for `SILENCE_S` is lost. Before, imports and reading may hold it up."""
        for child in self._children:
            child.heard = time.monotonic()
        self._is_ready = True

    def cause(self) -> str | None:
        """The fault behind an error that was just met here, waited for a moment; None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None, CAUSE_S)
        return self._fault

    def lose(self, reason: str) -> None:
        """Give the gang up: the first reason stands, and no process is left to go on without the others."""
        with self._changed:
            if self._fault is not None or self._is_closed:
                return
            self._fault = reason
            self._changed.notify_all()
        logger.error("the ranks of this replica are given up: %s", reason)
        for child in self._children:
            child.process.kill()

    def close(self) -> None:
        """End all processes and wait for that. May be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for child in self._children:
            child.process.kill()
        self._watcher.join(END_S)
        for child in self._children:
            child.close()

    def _have_met(self) -> bool:
        return all(child.num_met >= self._num_meetings for child in self._children)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.stdout, selectors.EVENT_READ, child)
            while self._fault is None and not self._is_closed:
                began = time.monotonic()  # what came before is read before anybody is called silent
                for key, _ in selector.select(BEAT_S):
                    self._take(key.data)
                self._check_silence(began)
        for child in self._children:  # all are being killed, whatever it was that ended the watch
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(END_S)

    def _take(self, child: Child) -> None:
        if not child.take():
            self.lose(child.end())
            return
        with self._changed:
            self._changed.notify_all()

    def _check_silence(self, now: float) -> None:
        silent = [child.number for child in self._children if now - child.heard > SILENCE_S]
        if silent and self._is_ready:
            self.lose(f"rank {silent[0]} has said nothing for {SILENCE_S:g} s")
