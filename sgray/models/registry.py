"""Which architectures there are. No torch."""

from __future__ import annotations

from sgray.errors import ModelLoadError
from sgray.models.family import Family
from sgray.models.llama import LLAMA
from sgray.models.mistral import MISTRAL
from sgray.models.mixtral import MIXTRAL
from sgray.models.qwen2 import QWEN2
from sgray.models.qwen2_moe import QWEN2_MOE
from sgray.models.qwen3 import QWEN3
from sgray.models.qwen3_moe import QWEN3_MOE

FAMILIES = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)


def find_family(architectures: object) -> Family:
    """The family of config.json's `architectures`; raises ModelLoadError that names what is supported."""
    supported = ", ".join(family.architecture for family in FAMILIES)
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError(f"config.json names no architecture; supported: {supported}")
    for family in FAMILIES:
        if family.architecture == architectures[0]:
            return family
    raise ModelLoadError(f"architecture {architectures[0]!r} is not supported; supported: {supported}")
