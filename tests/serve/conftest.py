"""Ray is imported here, once, with its own warnings put aside: importing it is not what these tests judge."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.schema  # noqa: F401
