"""Where the engine replicas are: addresses taken from Serve's own routing table, as it changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

METADATA_KEY = "sgray_link"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica's link listens, and the token that it wants to see."""

    host: str
    port: int
    token: str

    def as_metadata(self) -> dict[str, Any]:
        """What a replica hands to Serve."""
        return {METADATA_KEY: [self.host, self.port, self.token]}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Endpoint | None:
        """What `as_metadata` made; None for a replica that has said nothing yet."""
        entry = metadata.get(METADATA_KEY)
        if entry is None:
            return None
        host, port, token = entry
        return cls(str(host), int(port), str(token))


Listener = Callable[[dict[str, Endpoint]], None]


class ReplicaTable:
    """The live replicas of one deployment. `replace` and `subscribe` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._listeners: list[Listener] = []

    def replace(self, metadata: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """These are all replicas that Serve routes to now, with what each of them recorded about itself."""
        endpoints = {
            name: endpoint for name, entry in metadata if (endpoint := Endpoint.from_metadata(entry)) is not None
        }
        with self._lock:
            if endpoints == self._endpoints:
                return
            self._endpoints = endpoints
            for listener in self._listeners:
                listener(dict(endpoints))

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with the table now and after each change, in the thread that changes it; it may not block."""
        with self._lock:
            self._listeners.append(listener)
            listener(dict(self._endpoints))


# The one piece of state of this module. Serve builds the router object itself, deep inside the handle, and offers no
# way from the handle to it: the two can only meet in something that belongs to the process.
_tables: dict[tuple[str, str], ReplicaTable] = {}
_tables_lock = threading.Lock()


def table_of(app: str, deployment: str) -> ReplicaTable:
    """This process's table of a deployment, made when first asked for."""
    with _tables_lock:
        return _tables.setdefault((app, deployment), ReplicaTable())
