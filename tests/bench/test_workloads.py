from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sgray.bench.offline import warm_ups
from sgray.bench.workloads import CPU_FACTOR, Workload, offline_workloads, select
from sgray.errors import ConfigError

SIZES = {  # name: requests, prompt tokens of each, answer tokens of each
    "bs1_isl1024_osl1": (1, 1024, 1),
    "bs1_isl1024_osl257": (1, 1024, 257),
    "bs16_isl1024_osl257": (16, 1024, 257),
    "bs64_isl1024_osl257": (64, 1024, 257),
    "bs256_isl128_osl512": (256, 128, 512),
    "thr_1000_isl1024_osl256": (1000, 1024, 256),
    "prefill_48x8192_osl1": (48, 8192, 1),
    "long_32x16384_osl129": (32, 16384, 129),
    "shared_32x32_p4096_u128_osl128": (1024, 4096 + 128, 128),
    "shared_1x256_p8192_u128_osl257": (256, 8192 + 128, 257),
}


def test_the_ten_workloads_have_the_sizes_that_their_names_say() -> None:
    assert {
        name: (one.num_groups * one.group_size, one.prefix_len + one.unique_len, one.output_len)
        for name, one in offline_workloads().items()
    } == SIZES


@pytest.mark.parametrize("name", ["bs1_isl1024_osl257", "shared_32x32_p4096_u128_osl128"])
def test_prompts_have_the_stated_number_and_length_and_fit_the_vocabulary(name: str) -> None:
    workload = offline_workloads()[name]
    prompts = workload.prompts(random.Random(0), 49_152)
    requests, length, _ = SIZES[name]
    assert [len(prompts), {len(prompt) for prompt in prompts}] == [requests, {length}]
    assert all(1000 <= token < 49_152 for prompt in prompts for token in prompt)


def test_a_group_shares_its_prefix_and_nothing_more() -> None:
    workload = Workload(num_groups=3, group_size=4, prefix_len=20, unique_len=5, output_len=1, shuffled=True)
    prompts = workload.prompts(random.Random(1), 50_000)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for prompt in prompts:
        groups.setdefault(tuple(prompt[:20]), []).append(tuple(prompt[20:]))
    assert sorted(map(len, groups.values())) == [4, 4, 4]
    assert len({tail for tails in groups.values() for tail in tails}) == 12


def test_shuffling_mixes_the_groups() -> None:
    workload = Workload(num_groups=4, group_size=8, prefix_len=4, unique_len=1, output_len=1, shuffled=True)
    starts = [prompt[0] for prompt in workload.prompts(random.Random(2), 50_000)]
    assert sum(left != right for left, right in pairwise(starts)) > 3


def test_a_seed_fixes_the_prompts() -> None:
    workload = offline_workloads()["bs16_isl1024_osl257"]
    assert workload.prompts(random.Random(5), 1000) == workload.prompts(random.Random(5), 1000)
    assert workload.prompts(random.Random(5), 1000) != workload.prompts(random.Random(6), 1000)


def test_scaling_divides_counts_and_lengths_and_leaves_nothing_at_zero() -> None:
    for workload in select(None, CPU_FACTOR).values():
        assert min(workload.num_groups, workload.group_size, workload.unique_len, workload.output_len) >= 1
        assert workload.longest <= 8192
    assert select("shared_1x256_p8192_u128_osl257", 16) == {
        "shared_1x256_p8192_u128_osl257": Workload(1, 16, 512, 8, 16)
    }


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown workload 'bs2'.*bs1_isl1024_osl1"):
        select("bs1_isl1024_osl1,bs2", 1)


def test_a_gpu_run_draws_the_prompts_that_the_peers_had() -> None:
    """Their draw, written down again: one stream of numbers for the warm-up and for every workload after it."""
    ours, theirs = random.Random(0), random.Random(0)

    def ids(count: int) -> list[int]:
        return [theirs.randrange(1000, 120_000) for _ in range(count)]

    assert [warm.prompts(ours, 128_256) for warm in warm_ups("cuda")] == [
        [ids(512) for _ in range(64)],
        [ids(512)],
    ]
    workloads = offline_workloads()
    assert workloads["bs16_isl1024_osl257"].prompts(ours, 128_256) == [ids(1024) for _ in range(16)]
    prefixes = [ids(4096) for _ in range(32)]
    shared = [prefix + ids(128) for prefix in prefixes for _ in range(32)]
    expected = theirs.sample(shared, len(shared))
    assert workloads["shared_32x32_p4096_u128_osl128"].prompts(ours, 128_256) == expected
    prefix = ids(8192)
    assert workloads["shared_1x256_p8192_u128_osl257"].prompts(ours, 128_256) == [prefix + ids(128) for _ in range(256)]
