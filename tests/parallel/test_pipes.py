"""Messages through a pipe: whole, in order, and an error where nobody reads."""

from __future__ import annotations

import os
import threading
import time

import pytest

from sgray.parallel.pipes import receive, send


@pytest.mark.parametrize("spin_s", [0.0, 0.001, 10.0])
def test_messages_of_any_size_arrive_whole_and_in_order(spin_s: float) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    messages = [b"", b"x", bytes(range(256)) * 4000, b"last"]

    def write() -> None:
        for message in messages:
            send(writer, message, 10.0)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    assert [receive(reader, spin_s) for _ in messages] == messages
    assert receive(reader, spin_s) is None
    thread.join()
    os.close(reader)


def test_who_has_looked_in_vain_for_long_enough_sleeps() -> None:
    reader, writer = os.pipe()
    thread = threading.Timer(0.5, os.write, (writer, bytes(4)))
    thread.start()
    begin = time.thread_time()
    assert receive(reader, 0.02) == b""
    assert time.thread_time() - begin < 0.2
    thread.join()
    os.close(writer)
    os.close(reader)


def test_a_message_that_is_cut_short_is_none() -> None:
    reader, writer = os.pipe()
    os.write(writer, (100).to_bytes(4, "little") + b"half")
    os.close(writer)
    assert receive(reader) is None
    os.close(reader)


def test_a_pipe_that_nobody_reads_is_given_up() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        send(writer, bytes(2**20), 0.2)
    assert 0.2 <= time.monotonic() - began < 5
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        send(writer, b"x", 0.2)
    os.close(writer)
