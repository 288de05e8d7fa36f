"""`Runtime`: a server in a process of its own, started for the programs of this one, and gone with it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from typing import Any

from sgray.errors import ConfigError
from sgray.lang.endpoint import RuntimeEndpoint
from sgray.lang.engine_config import server_flags
from sgray.lang.native import NativeBackend
from sgray.supervisor import ServerDiedError, is_healthy, stop_server

POLL_S = 0.2
MAX_WORDS = 2000  # bytes of a dead server's output that are told


class Runtime:
    """`python -m sgray.launch_server` with these arguments, and its endpoint; returns when the server answers.

    Arguments are SGLang's, or leaves of the configuration. What the server prints is shown with `log_level` "info" or
    "debug", and kept to tell why it died otherwise. Raises ServerDiedError, or ConfigError after `timeout` seconds.
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        timeout: float = 600.0,
        chat_template_name: str | None = None,
        log_level: str = "error",
        **arguments: Any,
    ) -> None:
        given = arguments if model_path is None else {**arguments, "model_path": model_path}
        self.port = int(given.pop("port", 0) or _free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "sgray.launch_server", "--port", str(self.port), *server_flags(given)]
        command.append("--until-stdin-closes")  # which it does when this process ends, in whatever way
        self._log = None if log_level in ("info", "debug") else tempfile.TemporaryFile()  # noqa: SIM115 - kept
        words = None if self._log is None else subprocess.STDOUT
        self._server = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.PIPE, stdout=self._log, stderr=words
        )
        self._finalizer = weakref.finalize(self, stop_server, self._server)  # also when this process ends
        self.endpoint = RuntimeEndpoint(self.url, chat_template_name=chat_template_name)
        try:
            self._wait(timeout)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    @property
    def backend(self) -> NativeBackend:
        """The server as programs see it."""
        return self.endpoint.backend

    def generate(self, prompt: Any, sampling_params: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """The native answer to a text or a list of texts; see `Engine.generate`."""
        body = {"text": prompt, "sampling_params": dict(sampling_params or {}), **options}
        return self.endpoint.loop.run(self.backend.transport.call("generate", body))

    def flush_cache(self) -> bool:
        """Empty the server's prefix cache; False while requests hold it."""
        return self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """The server's facts."""
        return self.endpoint.get_server_info()

    def shutdown(self) -> None:
        """End the server and everything that it started. May be called twice."""
        self.endpoint.close()
        self._finalizer()
        assert self._server.stdin is not None
        self._server.stdin.close()
        if self._log is not None:
            self._log.close()

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_healthy(self.url):
            if (status := self._server.poll()) is not None:
                raise ServerDiedError(f"the server ended by itself with status {status}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ConfigError(f"the server did not answer within {timeout_s:g} s")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        if self._log is None:
            return "see its messages above"
        self._log.seek(max(0, self._log.seek(0, 2) - MAX_WORDS))
        return self._log.read().decode(errors="replace").strip() or "it said nothing"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
