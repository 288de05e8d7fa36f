"""Ray is imported here, once, with its own warnings put aside: importing it is not what these tests judge.

Also starts a browser once for all tests that look at the live page, and lets the tests of this
directory import from `tests/support`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.schema  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from browser import Page, browser_command, opened


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    """The one page of a headless Chromium."""
    command = browser_command()
    if command is None:
        pytest.skip("no Chromium: CHROMIUM names none, none is on the path, and PyQt6-WebEngine is not installed")
    with opened(command) as page:
        yield page
