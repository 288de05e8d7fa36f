"""The host of ranks on a node that is not rank 0's: it starts them, connected to rank 0, and ends them.

It lives until rank 0 leaves, or one of its ranks does, and leaves none behind. Knows neither plans nor Ray.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess

from sgray.engine.nodes import Invitation
from sgray.engine.ranks import BEAT, BEAT_S, FAILED, SILENCE_S, how_ended, start_rank
from sgray.parallel.sockets import dial


def host_ranks(invitation: Invitation) -> str:
    """The whole life of a host; why it has ended. Raises OSError where rank 0 cannot be reached."""
    own, *others = invitation.keys
    processes: list[subprocess.Popen[bytes]] = []
    with dial(invitation.address, invitation.port, own, SILENCE_S) as connection:
        try:
            for key in others:
                with dial(invitation.address, invitation.port, key, SILENCE_S) as way:
                    processes.append(start_rank(way.fileno(), way.fileno()))
            return _watch(connection, invitation.first_rank, processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _watch(connection: socket.socket, first_rank: int, processes: list[subprocess.Popen[bytes]]) -> str:
    """Beats until one of both sides leaves, and says which."""
    while not select.select([connection], [], [], BEAT_S)[0]:  # nothing is said to a host: that is the end
        for number, process in enumerate(processes, start=first_rank):
            if process.poll() is not None:
                reason = f"rank {number} {how_ended(process)}"
                with contextlib.suppress(OSError):
                    connection.sendall(FAILED + reason.encode())
                return reason
        try:
            connection.sendall(BEAT)
        except OSError:
            break
    return "rank 0 has left"
