"""The backend that programs run on unless they are told another one."""

from __future__ import annotations

from typing import Any, Protocol

from sgray.lang.backend import Backend


class Host(Protocol):
    """Whatever has a backend: an engine, an endpoint, a runtime, a handle, or a backend itself."""

    @property
    def backend(self) -> Backend:
        """How programs reach it."""
        ...


class GlobalConfig:
    """What a program needs to know of its process: `default_backend` alone."""

    def __init__(self) -> None:
        self.default_backend: Host | None = None


global_config = GlobalConfig()


def set_default_backend(backend: Host | None) -> None:
    """Programs without a backend of their own run on this one; None takes it away."""
    if backend is not None:
        backend_of(backend)
    global_config.default_backend = backend


def backend_of(given: Host | None) -> Backend:
    """The backend of `given`, or of the default; raises ValueError where there is neither."""
    host = given if given is not None else global_config.default_backend
    if host is None:
        raise ValueError("no backend: call sgl.set_default_backend(...) first, or give backend=...")
    try:
        return host.backend
    except AttributeError:
        raise TypeError(f"{type(host).__name__} is no backend; see docs/language.md for those there are") from None


def flush_cache(backend: Host | None = None) -> bool:
    """Empty the backend's prefix cache; False while requests hold it."""
    chosen = backend_of(backend)
    return chosen.loop.run(chosen.flush())


def get_server_info(backend: Host | None = None) -> dict[str, Any]:
    """Facts about whoever generates for the backend."""
    chosen = backend_of(backend)
    return chosen.loop.run(chosen.server_info())
