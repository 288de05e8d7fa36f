"""A hundred thousand random operations on scheduler and cache, with a proof of the books after each.

The fake model checks in every step that each page holds what the sequence needs; at the end every sequence has exactly
the tokens that it would have had alone, whatever was shared, chunked, batched, retracted or evicted meanwhile.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from fake_model import Rig, solo

from sgray.engine.sequence import Sequence
from sgray.errors import ContextLengthError, OverloadedError

NUM_OPERATIONS = 3125  # times 32 workloads: 100,000


@dataclass
class Known:
    tokens: list[int]


class Workload:
    """Random requests that often share a start, on a pool that is often too small."""

    def __init__(self, seed: int, page_size: int, num_pages: int, policy: str, depth: int) -> None:
        self.rng = random.Random(seed)
        self.page_size = page_size
        self.rig = Rig(
            num_pages=num_pages,
            page_size=page_size,
            budget=self.rng.choice([2, 7, 16, 64]),
            mixed=self.rng.choice([1, 5, 64]),
            max_running=self.rng.choice([1, 3, 8]),
            max_queued=6,
            context=10 * page_size + 40,
            policy=policy,
            lookahead=self.rng.choice([0, 0, 64]),
            checks=False,  # `run` checks
            depth=depth,
        )
        self.rig.executor.keep_plans = False
        self.live: dict[str, tuple[list[int], int]] = {}
        self.seen: list[Sequence | Known] = []
        self.num_added = self.num_checked = self.num_refused = self.num_short = self.num_stopped = 0

    def run(self, count: int) -> None:
        acts = [self.add, self.step, self.step, self.step, self.step, self.abort, self.evict]
        weights = [10, 10, 10, 10, 10, 2, 2]
        for act in self.rng.choices(acts, weights, k=count):
            act()
            self.rig.scheduler.check()
            self.settle()
        self.rig.run()
        self.settle()
        assert not self.live
        cache = self.rig.cache
        assert cache.num_leased == 0 and cache.num_free + cache.num_evictable == cache.num_pages
        assert sorted(cache.snapshot()) == sorted(set(cache.snapshot()))

    def add(self) -> None:
        rng = self.rng
        self.num_added += 1
        name = f"r{self.num_added}"
        if self.seen and rng.random() < 0.6:  # a sibling, or the next turn, of one that is in work or was
            base = rng.choice(self.seen).tokens
            start = base[: rng.choice([len(base), rng.randrange(1, len(base) + 1)])]
            prompt = start + [rng.randrange(3) for _ in range(rng.randrange(1 if not start else 0, 3))]
        else:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 5 * self.page_size + 8))]
        length = rng.choice([0, 1, 2, 5, 3 * self.page_size + 5])
        stops = rng.choice([0, 0, 120])  # of a thousand tokens: some end in the middle
        try:
            self.rig.add(
                name,
                prompt,
                priority=rng.choice([0, 0, 0, 1]),
                salt=rng.choice(["", "", "tenant"]),
                max_new_tokens=length,
                logprobs=rng.choice([-1, 0]),
                prompt_logprobs=rng.choice([-1, -1, -1, 0]),
                stop_token_ids=tuple(range(stops)),
            )
        except (OverloadedError, ContextLengthError):
            self.num_refused += 1
        else:
            self.live[name] = (prompt, length)
            self.seen = [*self.seen[-9:], self.rig.scheduler._sequences.get(name) or Known(prompt)]
            self.rig.take(self.rig.scheduler.drain())

    def step(self) -> None:
        self.rig.step()

    def abort(self) -> None:
        if self.live:
            self.rig.abort(self.rng.choice(list(self.live)))

    def evict(self) -> None:
        self.rig.cache.evict(self.rng.randrange(1, 6))

    def settle(self) -> None:
        """Compare what has ended with what it would have been alone."""
        for name in [name for name in self.live if self.rig.outputs[name].finish is not None]:
            prompt, length = self.live.pop(name)
            output = self.rig.outputs.pop(name)
            assert output.finish is not None
            assert output.tokens == solo(prompt, len(output.tokens))
            self.num_checked += 1
            if output.finish.reason == "abort":
                continue
            if output.finish.error is not None:  # it gave way to one of a higher priority
                assert (output.finish.error.code, output.tokens) == ("queue_full", [])
                continue
            if output.finish.reason == "stop":
                assert output.finish.matched == output.tokens[-1] < 200
                self.num_stopped += 1
            elif len(output.tokens) < length:  # only for want of memory: alone, with the whole pool full
                self.num_short += 1
                assert len(prompt) + len(output.tokens) > self.rig.cache.num_pages * self.page_size
            if output.prompt_logprobs is not None:
                assert len(output.prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize(("num_pages", "policy"), [(7, "fcfs"), (13, "lpm"), (24, "fcfs"), (60, "lpm")])
def test_random_operations_lose_no_page_and_change_no_result(
    page_size: int, num_pages: int, policy: str, depth: int
) -> None:
    workload = Workload(page_size * 1000 + num_pages, page_size, num_pages, policy, depth)
    workload.run(NUM_OPERATIONS)
    assert workload.num_checked > NUM_OPERATIONS // 20, "the workload must get through"
    assert workload.num_stopped > 0
