"""Other nodes that are this machine: hosts of ranks as processes, without Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from sgray.engine.nodes import Invitation

HOST = """
import sys
import msgspec
from sgray.engine.host import host_ranks
from sgray.engine.nodes import Invitation
host_ranks(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Invitation))
"""


class LocalNodes:
    """Starts a process for each host; `close` waits for their ends."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.hosts: list[subprocess.Popen[bytes]] = []

    def invite(self, invitations: Sequence[Invitation]) -> None:
        for invitation in invitations:
            host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE)
            assert host.stdin is not None
            with host.stdin:
                host.stdin.write(msgspec.msgpack.encode(invitation))
            self.hosts.append(host)

    def problem(self) -> str | None:
        ended = [host for host in self.hosts if host.poll() is not None]
        return f"a host ended with status {ended[0].returncode}" if ended else None

    def close(self) -> None:
        for host in self.hosts:
            host.wait(20)
