"""The lines of a batch's input file: rows, or what is wrong with them. Knows nothing of who keeps or runs the rows.

What stands inside a row's body is judged when the row runs, by the code that judges every call; only what a batch
cannot do at all is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from sgray.errors import InvalidRequestError
from sgray.serve.batches.records import MAX_ROWS, LineFault, Row
from sgray.serve.openai.validate import checked_text, kind, parse_json, shown

MAX_FAULTS = 100
MAX_CUSTOM_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


def read_rows(parts: Iterable[bytes], endpoint: str, *, max_line_bytes: int, max_depth: int) -> list[Row]:
    """The rows of a file given in parts. Raises FaultyFileError with what is wrong, up to a hundred lines of it."""
    rows: list[Row] = []
    faults: list[LineFault] = []
    seen: dict[str, int] = {}
    for number, line in _numbered(parts, max_line_bytes):
        if not line.strip():
            continue
        try:
            row = _row(number, line, endpoint, max_line_bytes, max_depth)
            _check_new(row, seen)
            rows.append(row)
        except InvalidRequestError as error:
            faults.append(LineFault(error.code or "invalid_request", error.message, error.param, number))
        if len(rows) > MAX_ROWS:
            faults.append(LineFault("too_many_rows", f"A batch has at most {MAX_ROWS} rows.", line=number))
        if len(faults) >= MAX_FAULTS or len(rows) > MAX_ROWS:
            break
    if not rows and not faults:
        faults.append(LineFault("empty_file", "The file has no rows."))
    if faults:
        raise FaultyFileError(faults)
    return rows


class FaultyFileError(Exception):
    """An input file that cannot be run; `faults` says why."""

    def __init__(self, faults: list[LineFault]) -> None:
        super().__init__(faults)
        self.faults = faults


def _numbered(parts: Iterable[bytes], max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers. Of a line that is too long comes as much as shows that it is."""
    number, rest = 0, b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            number += 1
            yield number, line
        if len(rest) > max_bytes:
            break
    yield number + 1, rest


def _row(number: int, line: bytes, endpoint: str, max_bytes: int, max_depth: int) -> Row:
    if len(line) > max_bytes:
        raise InvalidRequestError(f"The line is longer than the limit of {max_bytes} bytes.", code="line_too_long")
    try:
        given = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, max_depth)
    except InvalidRequestError as error:
        message = error.message.replace("The body", "The line")
        raise InvalidRequestError(message, code="invalid_json_line") from None
    if not isinstance(given, dict):
        raise InvalidRequestError(f"The line must be a JSON object, but it is {kind(given)}.", code="invalid_json_line")
    custom_id = _envelope(given, endpoint)
    return Row(number, custom_id, json.dumps(given["body"]))


def _envelope(given: dict[str, Any], endpoint: str) -> str:
    """The checked `custom_id`."""
    for name in given:
        if name not in _FIELDS:
            raise _wrong(
                shown(name)[1:-1], f"there is no such field; a row has {', '.join(_FIELDS)}", "unknown_parameter"
            )
    for name in _FIELDS:
        if given.get(name) is None:
            raise InvalidRequestError(
                f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
            )
    custom_id = checked_text("custom_id", "custom_id", given["custom_id"])
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _wrong("custom_id", f"a string of 1 to {MAX_CUSTOM_ID_CHARS} characters is allowed", "invalid_value")
    if given["method"] != "POST":
        raise _wrong("method", f"{shown(given['method'])} is not POST", "invalid_method")
    if given["url"] != endpoint:
        raise _wrong("url", f"{shown(given['url'])} is not the batch's endpoint, {endpoint}", "invalid_url")
    _check_body(given["body"])
    return custom_id


def _check_body(body: object) -> None:
    if not isinstance(body, dict):
        raise _wrong("body", f"expected an object, but got {kind(body)}", "invalid_type")
    if body.get("stream") not in (None, False):
        raise _wrong("body.stream", "a row's answer is stored whole; leave it out or send false", "invalid_value")
    if body.get("priority") is not None:
        raise _wrong("body.priority", "all rows have the lowest priority; leave it out", "invalid_value")


def _check_new(row: Row, seen: dict[str, int]) -> None:
    if first := seen.get(row.custom_id):
        raise _wrong("custom_id", f"{shown(row.custom_id)} stands in line {first} already", "duplicate_custom_id")
    seen[row.custom_id] = row.number


def _wrong(place: str, reason: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for '{place}': {reason}.", param=place, code=code)
