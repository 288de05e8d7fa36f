"""Lets the tests of this directory import `tests/support`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
