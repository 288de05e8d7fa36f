"""An uploaded file out of a multipart body, within a limit of bytes. It knows how a form is read, and keeps nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from sgray.errors import InvalidRequestError, RequestTooLargeError
from sgray.serve.batches.shapes import FileBody
from sgray.serve.batches.store import PART_BYTES
from sgray.serve.openai.http import ClientGoneError
from sgray.serve.openai.validate import checked_text, parse_body, shown, wrong_type, wrong_value

MAX_NAME_CHARS = 255
_FORM_BYTES = 16 * 2**10  # what the form has around the file
_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 1024


@dataclass(frozen=True)
class Upload:
    """One file: its name, its open content, and for how many seconds it is kept, if not for good."""

    filename: str
    file: BinaryIO
    keep_s: int | None

    def parts(self) -> Iterator[bytes]:
        """The content, from its start."""
        self.file.seek(0)
        while part := self.file.read(PART_BYTES):
            yield part

    def close(self) -> None:
        """Give the content up, which may be in a temporary file."""
        self.file.close()


async def read_upload(request: Request, max_bytes: int) -> Upload:
    """The file of a call. Raises an InvalidRequestError where there is none, or one that is too large or empty."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise InvalidRequestError(f"Content-Type {shown(kind)} is not accepted; send multipart/form-data.")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 19 or int(length) > max_bytes + _FORM_BYTES):
        raise _too_large(max_bytes)
    stream = _counted(request, max_bytes)
    parser = MultiPartParser(
        request.headers, stream, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:  # a form without a boundary is a KeyError there
        reason = error.message if isinstance(error, MultiPartException) else "it names no boundary"
        raise InvalidRequestError(f"The body is not a good multipart form: {reason}") from None
    finally:
        await stream.aclose()
    try:
        return _checked(form, max_bytes)
    except BaseException:
        await form.close()
        raise


async def _counted(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body, until it is larger than a file within the limit can make it."""
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes + _FORM_BYTES:
            raise _too_large(max_bytes)
        yield chunk
        if not message.get("more_body", False):
            break
    yield b""


def _checked(form: FormData, max_bytes: int) -> Upload:
    names = [name for name, _ in form.multi_items()]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequestError(f"The form has {shown(double)} twice.", param=shown(double)[1:-1])
    values: dict[str, Any] = dict(form.multi_items())
    upload = values.pop("file", None)
    for name, value in values.items():
        if isinstance(value, UploadFile):
            wrong_type(shown(name)[1:-1], shown(name)[1:-1], "a text", value.filename)
    body = parse_body(FileBody, _nested(values) | ({} if upload is None else {"file": ""}))
    if not isinstance(upload, UploadFile):
        wrong_value("file", "file", "it must be a file with a name, not a text.")
    if upload.size == 0:
        wrong_value("file", "file", "it is empty.")
    if (upload.size or 0) > max_bytes:
        raise _too_large(max_bytes)
    filename = checked_text("file", "file", upload.filename or "")
    if not 1 <= len(filename) <= MAX_NAME_CHARS or not filename.isprintable():
        wrong_value("file", "file", f"its name must have 1 to {MAX_NAME_CHARS} printable characters.")
    keep = body.expires_after
    return Upload(filename, upload.file, None if keep is None else keep.seconds)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a form with `a[b]` as an object in `a`, and seconds as a number."""
    found: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith("expires_after[")}
    inner = {
        name[len("expires_after[") : -1]: value
        for name, value in values.items()
        if name.startswith("expires_after[") and name.endswith("]")
    }
    if inner:
        seconds = inner.get("seconds", "")
        if seconds.isascii() and seconds.isdigit() and len(seconds) < 20:
            inner["seconds"] = int(seconds)
        found["expires_after"] = inner
    return found


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The file is larger than this server's limit of {max_bytes} bytes.", param="file")
