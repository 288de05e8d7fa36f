"""The named offline workloads: token-id prompts, a fixed number of answer tokens. No torch, no engine.

A workload is groups of requests; the requests of a group share a prefix. `bs64_isl1024_osl257` is 64 requests of 1024
prompt and 257 answer tokens; `shared_32x32_p4096_u128_osl128` is 32 groups of 32 requests, 4096 tokens shared by the
group and 128 of each request's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sgray.errors import ConfigError

CPU_FACTOR = 16
FIRST_ID, END_ID = 1000, 120_000  # ordinary tokens of a 128k vocabulary; smaller vocabularies end earlier


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_groups` x `group_size` requests; lengths in tokens. Each of `repeats` runs draws new prompts."""

    num_groups: int
    group_size: int
    prefix_len: int
    unique_len: int
    output_len: int
    repeats: int = 1
    shuffled: bool = False

    def scaled(self, factor: int) -> Workload:
        """Counts and lengths divided by `factor`, none below one; a workload without a shared prefix gets none."""
        return replace(
            self,
            num_groups=max(1, self.num_groups // factor),
            group_size=max(1, self.group_size // factor),
            prefix_len=self.prefix_len // factor,
            unique_len=max(1, self.unique_len // factor),
            output_len=max(1, self.output_len // factor),
        )

    def prompts(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """Token ids, one list a request."""
        end = min(END_ID, vocab_size)
        first = min(FIRST_ID, end // 2)

        def ids(count: int) -> list[int]:
            return [rng.randrange(first, end) for _ in range(count)]

        prefixes = [ids(self.prefix_len) for _ in range(self.num_groups)]
        prompts = [prefix + ids(self.unique_len) for prefix in prefixes for _ in range(self.group_size)]
        return rng.sample(prompts, len(prompts)) if self.shuffled else prompts

    @property
    def longest(self) -> int:
        """Tokens of the longest request, answer included."""
        return self.prefix_len + self.unique_len + self.output_len


def _plain(count: int, unique_len: int, output_len: int, repeats: int = 1) -> Workload:
    return Workload(count, 1, 0, unique_len, output_len, repeats)


def offline_workloads() -> Mapping[str, Workload]:
    """The ten workloads by name, at full size."""
    return {
        "bs1_isl1024_osl1": _plain(1, 1024, 1, repeats=5),
        "bs1_isl1024_osl257": _plain(1, 1024, 257, repeats=3),
        "bs16_isl1024_osl257": _plain(16, 1024, 257, repeats=2),
        "bs64_isl1024_osl257": _plain(64, 1024, 257, repeats=2),
        "bs256_isl128_osl512": _plain(256, 128, 512),
        "thr_1000_isl1024_osl256": _plain(1000, 1024, 256),
        "prefill_48x8192_osl1": _plain(48, 8192, 1),
        "long_32x16384_osl129": _plain(32, 16384, 129),
        "shared_32x32_p4096_u128_osl128": Workload(32, 32, 4096, 128, 128, shuffled=True),
        "shared_1x256_p8192_u128_osl257": Workload(1, 256, 8192, 128, 257),
    }


def select(only: str | None, factor: int) -> dict[str, Workload]:
    """The workloads named in the comma-separated `only` (all if None), scaled; raises ConfigError for a wrong name."""
    known = offline_workloads()
    names = list(known) if only is None else [name.strip() for name in only.split(",") if name.strip()]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"unknown workload {wrong[0]!r}; known are: {', '.join(known)}")
    return {name: known[name].scaled(factor) for name in names}
