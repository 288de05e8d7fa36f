"""Connections between processes of two machines that carry what pipes carry on one, opened with a key that each side
has got by another way.

A connection whose other end is silent because its machine is gone ends by itself. Knows nothing of what is sent.
"""

from __future__ import annotations

import hmac
import socket
import sys
import time
from collections.abc import Sequence

KEY_BYTES = 32
CLAIM_S = 2.0  # so long may whoever comes take to show a key


def listen(address: str) -> socket.socket:
    """A socket on a free port of this address alone."""
    return socket.create_server((address, 0), family=_family(address))


def dial(address: str, port: int, key: bytes, limit_s: float) -> socket.socket:
    """A connection that blocks, with `key` shown; OSError where there is none within `limit_s` seconds."""
    connection = socket.create_connection((address, port), timeout=limit_s)
    connection.sendall(key)
    connection.settimeout(None)
    prepare(connection, limit_s)
    return connection


def admit(door: socket.socket, keys: Sequence[bytes], limit_s: float) -> tuple[int, socket.socket] | None:
    """Who comes to `door` within `limit_s` seconds: the number of its key, and the connection. Others are sent away."""
    door.settimeout(limit_s)
    try:
        connection, _ = door.accept()
    except TimeoutError:
        return None
    shown = _shown(connection)
    matching = [number for number, key in enumerate(keys) if hmac.compare_digest(key, shown)]
    if not matching:
        connection.close()
        return None
    return matching[0], connection


def prepare(connection: socket.socket, silence_s: float) -> None:
    """Small messages leave at once, and a machine that answers nothing for `silence_s` seconds counts as gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        each_s = max(1, int(silence_s) // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def _shown(connection: socket.socket) -> bytes:
    """The key that comes first; less of it from who is slow, or leaves."""
    due, shown = time.monotonic() + CLAIM_S, b""
    try:
        while len(shown) < KEY_BYTES and (left_s := due - time.monotonic()) > 0:
            connection.settimeout(left_s)
            part = connection.recv(KEY_BYTES - len(shown))
            if not part:
                break
            shown += part
    except OSError:
        return b""
    return shown


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
