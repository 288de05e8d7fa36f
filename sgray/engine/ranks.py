"""A gang's other ranks, from the side of rank 0: begun together, watched together, ended together.

Down a rank's stdin go messages; when that ends, so does the rank. Up its stdout come single bytes: a beat a second, a
mark when it has come to a meeting, and, before it ends, the reason. Nobody answers a message: a rank that no longer
follows is seen by its silence. Ranks of this node are children at two pipes; those of other nodes, and the hosts that
started them there, come connected. Knows nothing of what the messages say, nor of torch.
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
from collections.abc import Iterable, Sequence
from typing import Protocol

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


class Line:
    """Messages down and bytes up, and what these have told: of how many meetings, when last, and why it failed.

    `down` does not block.
    """

    def __init__(self, name: str, down: int, up: int) -> None:
        self.name = name
        self.up = up
        self.heard = time.monotonic()
        self.num_met = 0
        self.reason = b""
        self._down = down

    def send(self, message: bytes) -> None:
        """Raises DeviceLostError where the message is not taken."""
        try:
            send(self._down, message, SILENCE_S)
        except (OSError, ValueError) as error:
            raise DeviceLostError(f"{self.name} takes no message: {error}") from error

    def take(self) -> bool:
        """What is said, which is there to be read; False when it ends."""
        try:
            said = os.read(self.up, MAX_SAID_BYTES)
        except BlockingIOError:  # of a connection that was ready and is no longer
            return True
        except OSError:  # of a connection whose other end is gone
            return False
        self.heard = time.monotonic()
        words, mark, reason = said.partition(FAILED)
        self.reason += reason
        self.num_met += words.count(MET)
        return bool(words) and not mark


class Member(Protocol):
    """A process that has a part in the gang, here or elsewhere."""

    @property
    def line(self) -> Line:
        """The way to it."""
        ...

    def end(self) -> str:
        """Why it ended, once it has; waits a moment for the reason."""
        ...

    def kill(self) -> None:
        """See to its end, without waiting for it."""
        ...

    def wait(self, limit_s: float) -> None:
        """Until it has ended, where that can be seen from here."""
        ...

    def close(self) -> None:
        """Give everything back, after its end."""
        ...


class Child:
    """A rank of this node."""

    def __init__(self, number: int, hello: bytes) -> None:
        """The process of a rank, which is told `hello`."""
        # What a dead rank has not read must not be in the way of closing: so there are no buffers.
        self.process = start_rank(subprocess.PIPE, subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        stdin, stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(stdin, False)
        self.line = Line(f"rank {number}", stdin, stdout)
        self.line.send(hello)

    def end(self) -> str:
        self.wait(CAUSE_S)
        if self.line.reason:
            return f"{self.line.name}: {self.line.reason.decode(errors='replace')}"
        return f"{self.line.name} {how_ended(self.process)}"

    def kill(self) -> None:
        self.process.kill()

    def wait(self, limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def start_rank(stdin: int, stdout: int) -> subprocess.Popen[bytes]:
    """The process of a rank between these two."""
    command = [sys.executable, "-W", "ignore", "-c", _START, *sys.path]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, bufsize=0)


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """What the status of a process tells of its end."""
    status = process.returncode
    return f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"


class Ranks:
    """A child for each of `hellos`, ranks 1 and up, and the `far` ranks after them; `hosts` are watched alone.

    `fault` says that one of them is lost, and then all are killed. Messages, meetings and `close` are one thread's
    matter, `fault` is anybody's. Who hands in members from elsewhere gives them up, unless this raises.
    """

    def __init__(self, hellos: Iterable[bytes], far: Sequence[Member] = (), hosts: Sequence[Member] = ()) -> None:
        self._changed = threading.Condition()
        self._fault: str | None = None
        self._num_meetings = 0
        self._is_ready = False
        self._is_closed = False
        self._children: list[Child] = []
        try:
            for number, hello in enumerate(hellos, start=1):
                self._children.append(Child(number, hello))
        except BaseException:
            for child in self._children:
                child.close()
            raise
        self._ranks: list[Member] = [*self._children, *far]
        self._members: list[Member] = [*self._ranks, *hosts]
        self._watcher = threading.Thread(target=self._watch, name="sgray-ranks", daemon=True)
        self._watcher.start()

    @property
    def fault(self) -> str | None:
        """Why there is no gang any more, if so."""
        return self._fault

    @property
    def processes(self) -> list[int]:
        """The ids of the processes on this node, by rank."""
        return [child.process.pid for child in self._children]

    def send(self, message: bytes) -> None:
        """Tell all ranks; DeviceLostError where one cannot be told."""
        for rank in self._ranks:
            rank.line.send(message)

    def meet(self) -> None:
        """Wait until all ranks have come to the meeting that this one comes to. DeviceLostError if one never will."""
        self._num_meetings += 1
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None or self._have_met())
        if self._fault is not None:
            raise DeviceLostError(self._fault)
        self.send(GO)

    def expect_beats(self) -> None:
        """From now on one that says nothing for `SILENCE_S` is lost. Before, imports and reading may hold it up."""
        for member in self._members:
            member.line.heard = time.monotonic()
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
        for member in self._members:
            member.kill()

    def close(self) -> None:
        """End all processes and wait for that. May be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for member in self._members:
            member.kill()
        self._watcher.join(END_S)
        for member in self._members:
            member.close()

    def _have_met(self) -> bool:
        return all(rank.line.num_met >= self._num_meetings for rank in self._ranks)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.line.up, selectors.EVENT_READ, member)
            while self._fault is None and not self._is_closed:
                began = time.monotonic()  # what came before is read before anybody is called silent
                for key, _ in selector.select(BEAT_S):
                    self._take(key.data)
                self._check_silence(began)
        for member in self._members:  # all are being killed, whatever it was that ended the watch
            member.wait(END_S)

    def _take(self, member: Member) -> None:
        if not member.line.take():
            self.lose(member.end())
            return
        with self._changed:
            self._changed.notify_all()

    def _check_silence(self, now: float) -> None:
        silent = [member.line.name for member in self._members if now - member.line.heard > SILENCE_S]
        if silent and self._is_ready:
            self.lose(f"{silent[0]} has said nothing for {SILENCE_S:g} s")
