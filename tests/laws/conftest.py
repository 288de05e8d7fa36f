"""Lets the tests of this directory import the fake model in `tests/support`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
