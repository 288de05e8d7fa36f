"""Ray is imported here, once, with its own warnings put aside: importing it is not what these tests judge.

Also lets the tests of this directory import from `tests/support`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.schema  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
