"""The life of one program: the name that its requests carry, and the moment from which nobody comes back to them.

It ends when the user's function has returned and no branch has anything to do, or at once when the program is
cancelled. A state that is written to afterwards makes it live, and end, again. Knows no requests.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable


class Life:
    """One program with all its branches. `on_end` gets its name, on whatever thread the end comes."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.name = uuid.uuid4().hex
        self.is_in_body = False
        self._on_end = on_end
        self._lock = threading.Lock()
        self._busy: set[object] = set()
        self._has_asked = False

    def ask(self) -> str:
        """The name for a request that is sent now."""
        self._has_asked = True
        return self.name

    def enter_body(self) -> None:
        """The user's function runs, and may add anything."""
        self.is_in_body = True

    def leave_body(self) -> None:
        """It has returned."""
        with self._lock:
            self.is_in_body = False
        self._check()

    def begin(self, branch: object) -> None:
        """A branch has something to do."""
        with self._lock:
            self._busy.add(branch)

    def finish(self, branch: object) -> None:
        """It has nothing to do; may be said again."""
        with self._lock:
            self._busy.discard(branch)
        self._check()

    def abandon(self) -> None:
        """Nobody will read what comes, whoever still runs."""
        with self._lock:
            self._busy.clear()
            self.is_in_body = False
        self._check()

    def _check(self) -> None:
        with self._lock:
            is_over = self._has_asked and not self.is_in_body and not self._busy
            if is_over:
                self._has_asked = False
        if is_over:
            self._on_end(self.name)
