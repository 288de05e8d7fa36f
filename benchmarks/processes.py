"""The processes of a service that this process has deployed, seen from outside: replicas, their ranks, their memory.

Knows them by their command lines, and nothing of what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

OLD_S = 30.0  # so long after it was loaded a process should not grow
MAX_GROWTH_MIB = 150.0
_STARTED = "from sgray.engine."  # in a command line, as in that of a rank
_RANK = f"{_STARTED}rank import"


@dataclass(frozen=True)
class Gang:
    """An engine replica and the ranks that it has started; none where it computes alone."""

    replica: psutil.Process
    ranks: tuple[psutil.Process, ...]

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """All of them, by rank."""
        return (self.replica, *self.ranks)


def gangs() -> list[Gang]:
    """The engine replicas, those included that are still loading, by process id."""
    return [
        Gang(process, tuple(child for child in _children(process) if _RANK in _command(child)))
        for process in sorted(psutil.Process().children(recursive=True), key=lambda one: one.pid)
        if _kind(process) == "LLMReplica"
    ]


def replica_pids() -> list[int]:
    """The engine replicas' processes."""
    return [gang.replica.pid for gang in gangs()]


def helpers(temp_dir: Path) -> list[psutil.Process]:
    """What engines that put their temporary files into this directory have started: ranks, and what tries grammars."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_started = _STARTED in _command(process) and process.environ().get("TMPDIR") == str(temp_dir)
            if is_started and not has_ended(process):
                found.append(process)
    return found


def orphans(temp_dir: Path) -> list[psutil.Process]:
    """Those of them whose engine is dead, and which are no descendants of this process any more."""
    found = helpers(temp_dir)  # before its descendants: what starts in between is none of them
    own = {process.pid for process in psutil.Process().children(recursive=True)}
    return [process for process in found if process.pid not in own and not has_ended(process)]


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more, even if nobody has asked for its status yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Scales:
    """Samples the memory of the service's processes."""

    def __init__(self) -> None:
        self._loaded: dict[int, float] = {}  # since when
        self._old: dict[int, tuple[str, float, float]] = {}  # kind, MiB when it became old, most MiB since

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(3)

    def growth(self) -> dict[str, float]:
        """By kind, the most that one process has grown since it became old, in MiB."""
        found: dict[str, float] = {}
        for kind, first, most in self._old.values():
            found[kind] = max(found.get(kind, 0.0), round(most - first, 1))
        return found

    def _sample(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                kind = _kind(process)
                if kind is None or "initialize" in process.cmdline()[0]:
                    continue
                now = time.monotonic()
                if now - self._loaded.setdefault(process.pid, now) < OLD_S:
                    continue
                mib = process.memory_info().rss / 2**20
                _, first, most = self._old.get(process.pid, (kind, mib, mib))
                self._old[process.pid] = (kind, first, max(most, mib))


def _kind(process: psutil.Process) -> str | None:
    line = _command(process)
    return next((kind for kind in ("Ingress", "LLMReplica") if f"ServeReplica:sgray:{kind}" in line), None)


def _command(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []
