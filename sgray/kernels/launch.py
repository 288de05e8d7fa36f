"""What the device that runs a kernel can do. The one place that asks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton


@dataclass(frozen=True, slots=True)
class Features:
    """`has_pdl`: programmatic dependent launch, a kernel may begin before its predecessor has ended.

    `has_tma`: loads of whole boxes by the tensor memory accelerator. `has_wgmma`: products by groups of four warps,
    which Hopper alone has.
    """

    num_sms: int
    has_pdl: bool
    has_tma: bool
    has_wgmma: bool


INTERPRETED = Features(num_sms=4, has_pdl=False, has_tma=True, has_wgmma=False)


def features(device: torch.device) -> Features:
    """The features of `device`; a small made-up machine where Triton interprets its kernels on the CPU."""
    if is_interpreted():
        return INTERPRETED
    return _features(device)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, as in the tests."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=64)
def _features(device: torch.device) -> Features:
    facts = torch.cuda.get_device_properties(device)
    target = triton.runtime.driver.active.get_current_target()
    has_hopper = target.backend == "cuda" and facts.major >= 9
    return Features(
        num_sms=facts.multi_processor_count,
        has_pdl=has_hopper,
        has_tma=has_hopper,
        has_wgmma=has_hopper and facts.major == 9,
    )
