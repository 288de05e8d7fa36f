"""What all tests share: the default model, fetched once a machine, and how examples are drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from sgray.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from sgray.text.tokenizer import Tokenizer

# Read when Triton is imported: its kernels then run on the CPU, in the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Examples are the same on every run, and none is judged by the clock of a busy machine.
settings.register_profile("sgray", deadline=None, derandomize=True)
settings.load_profile("sgray")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The directory of SmolLM2-135M-Instruct in Hugging Face's form; pulled and converted on the first use."""
    from sgray.models.hub import resolve_model

    return resolve_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of `model_dir`."""
    from sgray.text.tokenizer import Tokenizer

    return Tokenizer.load(model_dir)
