"""Fixtures of one folder of tests for another: pytest itself hands them to folders below alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def openai_fixtures() -> Any:
    """What the conftest of OpenAI's tests defines, as a module."""
    path = Path(__file__).parents[1] / "serve" / "openai" / "conftest.py"
    spec = importlib.util.spec_from_file_location("openai_fixtures", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
