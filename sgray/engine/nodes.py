"""The ranks of a gang that are on other nodes than rank 0: invited through somebody who can start a host there, and
connected to rank 0 one by one.

Each connection has a random key of its own, which goes with the invitation. What a rank on this node has as two pipes
one elsewhere has as its connection, so nothing else about it differs. The host's connection carries beats up and
nothing down; its end, on either side, is the end of all that the host has started. Knows neither Ray nor torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sgray.config import ParallelConfig
from sgray.engine.ranks import CAUSE_S, MAX_SAID_BYTES, SILENCE_S, Line
from sgray.errors import EngineError
from sgray.parallel.sockets import KEY_BYTES, admit, listen, prepare

COME_S = 120.0  # for all hosts to start and connect themselves and their ranks, which load nothing before that
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a host needs: where rank 0 is, the number of its first rank, and keys, its own and one for each rank."""

    address: str
    port: int
    first_rank: int
    keys: tuple[bytes, ...]


class Nodes(Protocol):
    """Who can start hosts on other nodes."""

    @property
    def address(self) -> str:
        """Where the other nodes reach this one."""
        ...

    def invite(self, invitations: Sequence[Invitation]) -> None:
        """Start a host on a node of its own for each of them; does not wait."""
        ...

    def problem(self) -> str | None:
        """Why a host that was invited will not come, if so."""
        ...


class Far:
    """A rank on another node or, without a `host`, what has started such ranks there."""

    def __init__(self, what: str, connection: socket.socket, host: Far | None = None) -> None:
        self.address = str(connection.getpeername()[0])
        prepare(connection, SILENCE_S)
        connection.setblocking(False)
        self.line = Line(f"{what} at {self.address}", connection.fileno(), connection.fileno())
        self._connection = connection
        self._host = host

    def end(self) -> str:
        if reason := self.reason(0.0):
            return f"{self.line.name}: {reason}"
        seen = "" if self._host is None else self._host.reason(2 * CAUSE_S)
        return seen or f"{self.line.name} has left"

    def reason(self, patience_s: float) -> str:
        """What it says about the end, waited for so long."""
        due = time.monotonic() + patience_s
        while not self.line.reason and select.select([self.line.up], [], [], max(0.0, due - time.monotonic()))[0]:
            if not self.line.take():
                break
        return _rest(self.line).decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it may have left
            self._connection.shutdown(socket.SHUT_RDWR)

    def wait(self, limit_s: float) -> None:
        pass

    def close(self) -> None:
        self._connection.close()


def gather(nodes: Nodes, parallel: ParallelConfig) -> tuple[list[Far], list[Far]]:
    """All ranks on further nodes, in order, and their hosts. Raises EngineError that says who did not come."""
    each = parallel.ranks_per_node
    keys = [tuple(secrets.token_bytes(KEY_BYTES) for _ in range(1 + each)) for _ in range(1, parallel.nnodes)]
    with listen(nodes.address) as door:
        port = door.getsockname()[1]
        nodes.invite([Invitation(nodes.address, port, (node + 1) * each, keys[node]) for node in range(len(keys))])
        came = _await_all(nodes, door, [key for some in keys for key in some])
    hosts: list[Far] = []
    ranks: list[Far] = []
    for node in range(len(keys)):
        first, *others = came[node * (1 + each) : (node + 1) * (1 + each)]
        hosts.append(Far("the host of ranks", first))
        ranks += [Far(f"rank {(node + 1) * each + local}", one, hosts[-1]) for local, one in enumerate(others)]
    return ranks, hosts


def _await_all(nodes: Nodes, door: socket.socket, keys: Sequence[bytes]) -> list[socket.socket]:
    """The connections, in the order of their keys, each of which opens once."""
    came: dict[int, socket.socket] = {}
    due = time.monotonic() + COME_S
    try:
        while len(came) < len(keys):
            left = [number for number in range(len(keys)) if number not in came]
            if (problem := nodes.problem()) is not None:
                raise EngineError(f"a host of ranks on another node could not start: {problem}")
            if time.monotonic() > due:
                raise EngineError(
                    f"{len(left)} of {len(keys)} connections from other nodes did not come in {COME_S:g} s"
                )
            if (found := admit(door, [keys[number] for number in left], LOOK_S)) is not None:
                came[left[found[0]]] = found[1]
    except BaseException:
        for connection in came.values():
            connection.close()
        raise
    return [came[number] for number in range(len(keys))]


def _rest(line: Line) -> bytes:
    """The whole reason: unlike a pipe, a connection may bring it in pieces."""
    due = time.monotonic() + CAUSE_S
    while line.reason and (left_s := due - time.monotonic()) > 0 and select.select([line.up], [], [], left_s)[0]:
        try:
            more = os.read(line.up, MAX_SAID_BYTES)
        except OSError:
            break
        if not more:
            break
        line.reason += more
    return line.reason
