"""What is kept of files, batches and rows, as plain data. Knows neither how it is stored nor how a client sees it.

Times are whole seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The routes whose calls a row may be."""

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of a batch that somebody has to work on."""

MAX_ROWS = 50_000
"""Most rows of a batch: OpenAI's limit."""


@dataclass(frozen=True)
class FileRecord:
    """A file: uploaded, or the outcome of a batch."""

    id: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True)
class LineFault:
    """What is wrong with an input file: where, and in which field. `line` counts from 1; None is the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Row:
    """One call of a batch. `number` is its line, from 1; `body` is the call's body as JSON."""

    number: int
    custom_id: str
    body: str


@dataclass(frozen=True)
class BatchRecord:
    """A batch. `times` has when it came into each state, as "in_progress_at"."""

    id: str
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    times: dict[str, int] = field(default_factory=dict)
    faults: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
