"""Who may call: API keys and the operator's keys, checked before anything of a call is read.

While any key is set, every route is closed but those that a load balancer asks and the files of the live page. A key is
compared by its digest, and in constant time; the key itself is kept, logged and answered nowhere. It knows nothing of
the routes behind it, except that some are the operator's: those are wrapped in `for_admin`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sgray.config import ApiConfig, KeyHashes, key_hash
from sgray.errors import AdminKeyRequiredError, ConfigError, InvalidKeyError
from sgray.serve.openai.http import Handler, error_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/", "/page/page.css", "/page/page.js"})
"""What is open without a key. A load balancer asks the first three, which tell one bit: whether this server can take
work. The others are the files of the live page, the same on every server, in which a browser asks for the key."""

CALLER = "sgray.caller"
"""Where a scope keeps the SHA-256 digest, in hex, of the key that a call came with; not there without keys."""

_ACCESS = "sgray.access"  # where a scope keeps what its key opens
_LOOK_AGAIN_S = 1.0
_MAX_FILE_BYTES = 2**20


class Access(enum.Enum):
    """What a call may do."""

    CALLER = "caller"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: what the key opens, and the key's digest."""

    access: Access
    digest: bytes


class KeyFile:
    """The digests of the keys in one file: a key, or `sha256:` and its digest, a line; `#` begins a comment line.

    Raises ConfigError where the file cannot be read at first. Later, a file that is gone or wrong changes nothing: the
    log says so, and the keys that were read last stay. An empty file is good, and closes the server to all.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._mark = self._look()
        self.digests = self._read()

    def refresh(self) -> None:
        """Read the file again if it changed."""
        mark = self._look()
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self.digests = self._read()
        except ConfigError as error:
            logger.error("the keys that were read last stay in force: %s", error.message)

    def _look(self) -> tuple[int, ...] | None:
        """What changes with the file; None where there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self._path.open("rb") as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{self._name}: {self._path}: {error.strerror}") from None
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError(f"{self._name}: {self._path} is larger than {_MAX_FILE_BYTES} bytes")
        return tuple(
            bytes.fromhex(key_hash(key, f"{self._name}: {self._path}, line {number}"))
            for number, line in enumerate(raw.splitlines(), start=1)
            if (key := line.strip()) and not key.startswith(b"#")
        )


class Keyring:
    """All keys of a server, from its files and its environment.

    Raises ConfigError where a file cannot be read. Files are looked at again after a second, when the next call comes.
    """

    def __init__(self, api: ApiConfig, environment: KeyHashes, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked = now()
        self._api = _files(api.api_keys_file, "api.api_keys_file")
        self._admin = _files(api.admin_keys_file, "api.admin_keys_file")
        self._environment_api = tuple(map(bytes.fromhex, environment.api))
        self._environment_admin = tuple(map(bytes.fromhex, environment.admin))
        self.is_closed = any((self._api, self._admin, self._environment_api, self._environment_admin))

    def caller(self, keys: Iterable[bytes]) -> Caller | None:
        """Who comes with these keys, by the best of them; None where none is good."""
        self._refresh()
        digests = [hashlib.sha256(key).digest() for key in keys if key]
        caller = _equal(digests, self._digests(self._environment_api, self._api))
        admin = _equal(digests, self._digests(self._environment_admin, self._admin))
        if admin is not None:
            return Caller(Access.ADMIN, admin)
        return None if caller is None else Caller(Access.CALLER, caller)

    def _digests(self, fixed: tuple[bytes, ...], files: Sequence[KeyFile]) -> tuple[bytes, ...]:
        return fixed + tuple(digest for file in files for digest in file.digests)

    def _refresh(self) -> None:
        now = self._now()
        if now - self._looked < _LOOK_AGAIN_S:
            return
        self._looked = now
        for file in (*self._api, *self._admin):
            file.refresh()


class Keys:
    """Refuses calls without a good key with a 401. Knows no route but the open ones: a new route is closed."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, with what it may do and whose it is in its scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller: Caller | None = None
        if self._keyring.is_closed:
            authorization, key = _header(scope, b"authorization"), _header(scope, b"x-api-key")
            caller = self._keyring.caller((_bearer(authorization), key))
            if caller is None and scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            if caller is None and _path(scope) not in OPEN_PATHS:
                error = InvalidKeyError(_reason(authorization, key))
                await error_response(error, scope, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        if caller is not None:
            scope[CALLER] = caller.digest.hex()
            scope[_ACCESS] = caller.access
        elif not self._keyring.is_closed:
            scope[_ACCESS] = Access.ADMIN
        await self._app(scope, receive, send)


def for_admin(handler: Handler) -> Handler:
    """The handler of an operator's route: a caller's key gets a 403. Without any key set, everything is open."""

    async def checked(request: Request) -> Response:
        if request.scope.get(_ACCESS) is not Access.ADMIN:
            raise AdminKeyRequiredError("This route needs an admin key: one of api.admin_keys_file or SGRAY_ADMIN_KEY.")
        return await handler(request)

    return checked


def _files(path: str | None, name: str) -> tuple[KeyFile, ...]:
    return () if path is None else (KeyFile(Path(path).expanduser(), name),)


def _equal(digests: Sequence[bytes], known: Sequence[bytes]) -> bytes | None:
    """The first digest that is known. All pairs are compared, so that the time tells nothing of which."""
    good = [digest for digest in digests for other in known if hmac.compare_digest(digest, other)]
    return good[0] if good else None


def _header(scope: Scope, name: bytes) -> bytes:
    """The first value of a header; empty where there is none."""
    return next((bytes(value).strip() for given, value in scope["headers"] if given == name), b"")


def _bearer(authorization: bytes) -> bytes:
    """The key of `Bearer KEY`; empty for other schemes."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _path(scope: Scope) -> str:
    """The path as the routes see it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _reason(authorization: bytes, key: bytes) -> str:
    """What is wrong with the headers of a call that is refused; quotes nothing of them."""
    form = "Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    if _bearer(authorization) or key:
        return "The API key is not valid here."
    if authorization:
        return f"The Authorization header is not of the form 'Bearer KEY'. {form}"
    return f"This server needs an API key, and none was given. {form}"
