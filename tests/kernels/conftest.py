"""Kernels run in Triton's interpreter here, with its bfloat16 set right; with TRITON_INTERPRET=0 on the GPU."""

import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton comes with the extra `dev` on Linux")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch  # noqa: E402

if triton.knobs.runtime.interpret:
    import interpreter

    interpreter.install()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the CPU when they are interpreted."""
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
