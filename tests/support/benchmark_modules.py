"""The programs in `benchmarks/` as modules, which they are not for anybody else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def loaded(name: str) -> Iterator[ModuleType]:
    """One of them; afterwards neither it nor what it has imported from its directory is a module any more."""
    programs = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert not programs & sys.modules.keys(), "what a program imports would be a module of somebody else"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module
        for other in programs - {name}:
            sys.modules.pop(other, None)
