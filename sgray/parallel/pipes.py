"""Messages between processes over a pipe or a connection: four bytes of length, then the message.

Knows nothing of what they say. Either holds a few, so that who sends need not wait for who reads.
"""

from __future__ import annotations

import os
import select
import time


def send(pipe: int, message: bytes, limit_s: float) -> None:
    """Writes a message into a pipe that does not block.

    Raises TimeoutError where the pipe is full for `limit_s` seconds, and OSError where nobody will read it.
    """
    rest = memoryview(len(message).to_bytes(4, "little") + message)
    due = 0.0
    while rest:
        try:
            rest = rest[os.write(pipe, rest) :]
            due = 0.0
        except BlockingIOError:
            due = due or time.monotonic() + limit_s
            left_ms = (due - time.monotonic()) * 1000
            poll = select.poll()
            poll.register(pipe, select.POLLOUT)
            if left_ms <= 0 or not poll.poll(left_ms):
                raise TimeoutError(f"nothing was read for {limit_s:g} s") from None


def receive(pipe: int, spin_s: float = 0.0) -> bytes | None:
    """The next message, waited for; None when there will be none.

    For `spin_s` seconds it is asked for without a pause, which costs a core: being woken takes longer than reading.
    """
    if spin_s:
        poll, due = select.poll(), time.monotonic() + spin_s
        poll.register(pipe, select.POLLIN)
        while not poll.poll(0) and time.monotonic() < due:
            pass
    head = _exactly(pipe, 4)
    return None if head is None else _exactly(pipe, int.from_bytes(head, "little"))


def _exactly(pipe: int, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = os.read(pipe, count)
        except OSError:  # a connection ends so where the other side is gone with something unread, or its machine is
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
