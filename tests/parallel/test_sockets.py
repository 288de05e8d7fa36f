"""Connections that open with a key alone."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgray.parallel.sockets import KEY_BYTES, admit, dial, listen

KEYS = [bytes([number]) * KEY_BYTES for number in range(3)]


def test_who_shows_a_key_is_known_by_it_and_both_sides_can_speak() -> None:
    with listen("127.0.0.1") as door, ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(dial, "127.0.0.1", door.getsockname()[1], KEYS[2], 5.0)
        found = admit(door, KEYS, 5.0)
        assert found is not None and found[0] == 2
        with dialled.result() as mine, found[1] as yours:
            yours.sendall(b"down")
            assert os.read(mine.fileno(), 9) == b"down"
            os.write(mine.fileno(), b"up")
            assert yours.recv(9) == b"up"


@pytest.mark.parametrize(
    "said", [b"", b"short", b"x" * KEY_BYTES, KEYS[0][:-1]], ids=["nothing", "short", "wrong", "cut"]
)
def test_who_shows_no_key_is_sent_away(said: bytes) -> None:
    with listen("127.0.0.1") as door, socket.create_connection(door.getsockname()) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert admit(door, KEYS, 5.0) is None
        assert stranger.recv(9) == b""


def test_nobody_is_waited_for_longer_than_was_said() -> None:
    with listen("127.0.0.1") as door:
        assert admit(door, KEYS, 0.05) is None
