"""The bodies and answers of the batch API in OpenAI's shapes, and records written in them. It asks no store."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sgray.serve.batches.records import BatchRecord, FileRecord, LineFault
from sgray.serve.openai.answer_shapes import AnswerBody
from sgray.serve.openai.forms import Json
from sgray.serve.openai.request_shapes import Like
from sgray.serve.openai.schemas import Body

WINDOWS = {"24h": 24 * 3600}
MIN_KEEP_S, MAX_KEEP_S = 3600, 30 * 24 * 3600
MAX_FILES_LISTED = 10_000  # as many as are listed where the call does not say
BATCHES_LISTED, MAX_BATCHES_LISTED = 20, 100
MAX_PAIRS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512


class KeepFor(Body):
    """When a file is forgotten by itself."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)


class FileBody(Body):
    """POST /v1/files, as multipart/form-data."""

    file: str = Field(description="The file, with a name.", json_schema_extra={"format": "binary"})
    purpose: Literal["batch"]
    expires_after: KeepFor | None = Field(
        None, description="As the form's fields `expires_after[anchor]` and `expires_after[seconds]`."
    )


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str = Field(max_length=128, description="An uploaded file with the purpose `batch`.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[Any, Like(dict[str, str])] = Field(
        None,
        description=f"At most {MAX_PAIRS} names of {MAX_NAME_CHARS} and texts of {MAX_VALUE_CHARS} characters.",
    )
    output_expires_after: KeepFor | None = Field(None, description="When the batch's output files are forgotten.")


class FileAnswer(AnswerBody):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int = Field(description="Seconds since 1970, as all times here.")
    expires_at: int | None
    filename: str
    purpose: str = Field(description="`batch`, or `batch_output` for what a batch wrote.")
    status: Literal["processed"]
    status_details: None


class FileList(AnswerBody):
    """Some of the files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(AnswerBody):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class LineError(AnswerBody):
    """What is wrong with an input file."""

    code: str
    message: str
    param: str | None
    line: int | None = Field(description="Counted from 1; null where it is the file as a whole.")


class LineErrors(AnswerBody):
    """Everything that is wrong with an input file, up to a hundred lines."""

    object: Literal["list"]
    data: list[LineError]


class RequestCounts(AnswerBody):
    """The rows of a batch."""

    total: int
    completed: int
    failed: int


class BatchAnswer(AnswerBody):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="Rows that were answered, one a line, at the batch's end.")
    error_file_id: str | None = Field(description="Rows that were not.")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(AnswerBody):
    """Some of the batches, the newest first."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_json(file: FileRecord) -> Json:
    """A `FileAnswer`."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_json(batch: BatchRecord) -> Json:
    """A `BatchAnswer`."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": _errors_json(batch.faults) if batch.faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{state}_at": batch.times.get(f"{state}_at") for state in _TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


def list_json(items: list[Json], *, has_more: bool) -> Json:
    """A `FileList` or a `BatchList`."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}


def _errors_json(faults: tuple[LineFault, ...]) -> Json:
    data = [
        {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line} for fault in faults
    ]
    return {"object": "list", "data": data}
