"""The policies side by side, and what the router does about time: late reports, silence, newcomers, other routers."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import get_args

import pytest

from sgray.config import Config, RoutingPolicy
from sgray.errors import ConfigError
from sgray.protocol import CacheEvent, Load, namespace_key, page_hashes
from sgray.serve.router import Router, Ticket
from sgray.serve.routing.watch import WatchLimits

PAGE = 16
POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pages_of(first: int, count: int) -> list[int]:
    """The hashes of `count` pages that begin with `first`; more of the same begin with the same."""
    return page_hashes([first] * (count * PAGE), PAGE, namespace_key())


def router_of(count: int, policy: RoutingPolicy = "cost", limits: WatchLimits | None = None) -> tuple[Router, Clock]:
    clock = Clock()
    router = Router(PAGE, policy, limits=limits, clock=clock)
    for index in range(count):
        router.join(f"r{index}")
    return router, clock


def ask(router: Router, hashes: list[int], num_tokens: int | None = None) -> Ticket:
    ticket = router.choose(hashes, len(hashes) * PAGE + 1 if num_tokens is None else num_tokens)
    assert ticket is not None
    router.check()
    return ticket


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_configured_and_chooses_a_replica(policy: RoutingPolicy) -> None:
    assert Config.parse({"serve": {"routing_policy": policy}}).serve.routing_policy == policy
    router, _ = router_of(3, policy)
    for seed in range(30):
        assert ask(router, pages_of(seed, seed % 4)).replica in router.replicas


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"routing_policy.*consistent_hash"):
        Config.parse({"serve": {"routing_policy": "random"}})


@pytest.mark.parametrize("policy", set(POLICIES) - {"round_robin", "least_load", "consistent_hash"})
def test_policies_that_know_the_cache_follow_it_while_loads_are_even(policy: RoutingPolicy) -> None:
    router, _ = router_of(4, policy)
    router.apply("r2", [CacheEvent("stored", pages_of(7, 40))])
    assert ask(router, pages_of(7, 40)).replica == "r2"


@pytest.mark.parametrize("policy", ["cost", "least_load", "sglang"])
def test_these_leave_a_replica_with_a_match_once_it_is_much_busier(policy: RoutingPolicy) -> None:
    router, _ = router_of(4, policy)
    router.apply("r2", [CacheEvent("stored", pages_of(7, 40))])
    router.report("r2", Load(running=60, waiting=40, waiting_tokens=200_000))
    assert ask(router, pages_of(7, 40)).replica != "r2"


def test_rays_rule_never_leaves_the_longest_match() -> None:
    router, _ = router_of(4, "ray_prefix")
    router.apply("r2", [CacheEvent("stored", pages_of(7, 40))])
    router.report("r2", Load(running=500, waiting=400, waiting_tokens=10**7))
    assert ask(router, pages_of(7, 40)).replica == "r2"


def test_rays_rule_takes_the_smallest_cache_for_a_miss() -> None:
    router, _ = router_of(3, "ray_prefix")
    router.replace("r0", pages_of(1, 5))
    router.replace("r2", pages_of(2, 5))
    assert ask(router, pages_of(7, 40)).replica == "r1"


def test_sglangs_rule_ignores_a_match_of_less_than_half() -> None:
    router, _ = router_of(2, "sglang")
    router.apply("r0", [CacheEvent("stored", pages_of(7, 19))])
    router.report("r0", Load(running=1))
    elsewhere = ask(router, pages_of(7, 40))
    assert elsewhere.replica == "r1"
    router.finish(elsewhere)
    router.apply("r0", [CacheEvent("stored", pages_of(7, 25))])
    assert ask(router, pages_of(7, 40)).replica == "r0"


def test_the_sticky_rule_lets_go_after_seconds_of_work_more_than_elsewhere() -> None:
    router, _ = router_of(2, "llmd_sticky")
    router.apply("r0", [CacheEvent("stored", pages_of(7, 40))])
    speed = router.speeds.prefill_tokens_per_s
    router.report("r0", Load(waiting_tokens=int(13 * speed)))
    assert ask(router, pages_of(7, 40)).replica == "r0"
    router.report("r0", Load(waiting_tokens=int(15 * speed)))
    assert ask(router, pages_of(7, 40)).replica == "r1"


def test_consistent_hashing_keeps_a_start_together_until_its_home_is_over_the_bound() -> None:
    router, _ = router_of(4, "consistent_hash")
    for name in router.replicas:
        router.report(name, Load(running=10))
    homes = [ask(router, pages_of(7, 130) + pages_of(100 + index, 1)).replica for index in range(40)]
    assert homes[0] == homes[1]
    assert max(Counter(homes).values()) <= 16, "more than the bound allows"
    fresh, _ = router_of(4, "consistent_hash")
    assert ask(fresh, pages_of(7, 130)).replica == homes[0], "the home does not depend on history"


def test_least_load_deals_evenly_whatever_is_cached() -> None:
    router, _ = router_of(4, "least_load")
    router.replace("r0", pages_of(7, 40))
    assert set(Counter(ask(router, pages_of(7, 40)).replica for _ in range(40)).values()) == {10}


def test_a_report_counts_what_was_booked_before_its_step_and_nothing_else() -> None:
    router, clock = router_of(1)
    early = ask(router, [], 1000)
    clock.now += 1.0
    late = ask(router, [], 500)
    clock.now += 0.1
    router.report("r0", Load(running=1, waiting_tokens=400, steps=1, last_step_s=0.5))
    state = router._replicas["r0"]
    assert list(state.unseen) == [late]
    assert (state.num_requests, state.unseen_uncached) == (2, 500)
    router.start(late, 0)
    router.finish(early)
    router.check()
    assert not state.unseen


def test_a_backlog_shrinks_while_no_report_comes() -> None:
    router, clock = router_of(2)
    router.report("r0", Load(waiting=1, waiting_tokens=int(2 * router.speeds.prefill_tokens_per_s)))
    router.apply("r0", [CacheEvent("stored", pages_of(7, 20))])
    assert router.choose(pages_of(9, 20), 321).replica == "r1"  # type: ignore[union-attr]
    clock.now += 3.0
    router.report("r1", Load(waiting=1, waiting_tokens=int(router.speeds.prefill_tokens_per_s)))
    assert ask(router, pages_of(8, 20)).replica == "r0"


def test_a_silent_replica_that_owes_an_answer_is_passed_over_until_it_speaks() -> None:
    router, clock = router_of(2)
    owing = ask(router, pages_of(7, 40))
    other = "r1" if owing.replica == "r0" else "r0"
    clock.now += 6.0
    assert router.silent() == [owing.replica]
    assert {ask(router, pages_of(7, 40)).replica for _ in range(20)} == {other}
    router.report(owing.replica, Load(running=1, steps=1, last_step_s=0.1))
    assert router.silent() == []
    router.report(other, Load(running=20, waiting_tokens=90_000, steps=1, last_step_s=0.1))
    assert ask(router, pages_of(7, 40)).replica == owing.replica


def test_an_idle_replica_may_be_silent_and_the_last_one_is_chosen_whatever_it_does() -> None:
    router, clock = router_of(1)
    clock.now += 1000.0
    assert router.silent() == []
    ask(router, pages_of(7, 40))
    clock.now += 1000.0
    assert router.silent() == ["r0"]
    assert ask(router, pages_of(7, 40)).replica == "r0"


def test_a_replica_with_long_steps_is_given_their_time() -> None:
    router, clock = router_of(2)
    router.report("r0", Load(running=1, steps=1, last_step_s=3.0))
    router.report("r1", Load(running=1, steps=1, last_step_s=3.0))
    ask(router, pages_of(7, 40))
    clock.now += 20.0
    assert router.silent() == []
    clock.now += 20.0
    assert len(router.silent()) == 1


def finish_all(router: Router, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        router.start(ticket, 0)
        router.finish(ticket)


def newcomers_share(limits: WatchLimits) -> int:
    """Of 60 prompts one after the other, those that an idle replica gets that has just joined four with work to do."""
    router, clock = router_of(4, limits=limits)
    finish_all(router, [ask(router, pages_of(5000 + seed, 20)) for seed in range(100)])
    clock.now += 60.0
    for index in range(4):
        router.report(f"r{index}", Load(running=20, waiting_tokens=1000, steps=1))
    router.join("new")
    tickets = []
    for seed in range(60):
        tickets.append(ask(router, pages_of(seed, 20)))
        finish_all(router, tickets[-1:])
    return sum(ticket.replica == "new" for ticket in tickets)


def test_a_new_replica_is_not_flooded_by_all_that_comes() -> None:
    slow, fast = newcomers_share(WatchLimits()), newcomers_share(WatchLimits(young_s=0.0))
    assert 10 <= slow <= 40 < fast, (slow, fast)


def test_when_all_old_replicas_are_busy_a_new_one_takes_what_it_can() -> None:
    router, clock = router_of(2)
    clock.now += 60.0
    for index in range(2):
        router.report(f"r{index}", Load(waiting=9, waiting_tokens=10**6, steps=1))
    router.join("new")
    assert {ask(router, pages_of(seed, 20)).replica for seed in range(20)} == {"new"}


def test_the_number_of_routers_is_seen_in_what_they_book() -> None:
    router, _ = router_of(1)
    assert router.peers == 1.0
    for index in range(300):
        finish_all(router, [ask(router, [], 10)])
        names = [f"{index} {peer}" for peer in range(3)]
        for name in names:
            router.book_peer("r0", name, 10, 0, [])
        router.finish_peers("r0", names)
    assert 3.8 <= router.peers <= 4.2
    router.check()


@pytest.mark.parametrize("num_routers", [2, 4])
def test_siblings_over_several_routers_meet_although_none_knows_of_the_others(num_routers: int) -> None:
    """A cold prompt has one home for all who see the same reports."""
    agreed = 0
    for seed in range(40):
        chosen = set()
        for _ in range(num_routers):
            router, _ = router_of(8)
            for index in range(8):
                router.report(f"r{index}", Load(running=index % 3, steps=1))
            chosen |= {ask(router, pages_of(seed, 50)).replica for _ in range(3)}
        agreed += len(chosen) == 1
    assert agreed >= 36


def test_speeds_are_learned_from_steps_and_do_not_need_the_replicas_own_figures() -> None:
    router, _ = router_of(1)
    before = Load(steps=1)
    router.report("r0", before)
    prompt = generated = requests = 0
    for step in range(2, 800):
        running, context = step % 17 + 1, (step * 977) % 9000
        is_prefill = step % 4 == 0
        prompt += 500 * is_prefill
        generated += 10
        requests += step % 2 == 0
        seconds = 0.05 if is_prefill else 0.004 + 0.0002 * running + 1e-6 * context
        router.report(
            "r0",
            Load(
                running=running,
                resident_tokens=context,
                waiting_tokens=10 * is_prefill,
                steps=step,
                prompt_tokens=prompt,
                generation_tokens=generated,
                requests=requests + running,
                last_step_s=seconds,
            ),
        )
    speeds = router.speeds
    assert speeds.sequence_s == pytest.approx(0.0002, rel=0.1)
    assert speeds.context_s == pytest.approx(1e-6, rel=0.1)
    assert 5_000 < speeds.prefill_tokens_per_s < 11_000
    assert speeds.expected_output == pytest.approx(20, rel=0.2)


def test_memory_is_bounded_by_what_replicas_store_and_requests_need() -> None:
    router, clock = router_of(2)
    stored: list[int] = []
    for seed in range(400):
        ticket = ask(router, pages_of(seed, 10))
        router.start(ticket, 0)
        router.apply(ticket.replica, [CacheEvent("stored", ticket.hashes)])
        router.finish(ticket)
        stored.append(seed)
        if len(stored) > 8:
            gone = pages_of(stored.pop(0), 10)
            for name in ("r0", "r1"):
                router.apply(name, [CacheEvent("removed", gone)])
        clock.now += 0.1
    assert router.num_pages == 80
    assert all(not replica.unseen and not replica.tickets for replica in router._replicas.values())


def median_seconds(router: Router, hashes: list[list[int]]) -> float:
    """Of one decision, booking and end included; of the processor, so that a busy machine does not count."""
    taken = []
    for one in hashes:
        begin = time.thread_time()
        ticket = router.choose(one, len(one) * 64 + 1)
        taken.append(time.thread_time() - begin)
        assert ticket is not None
        router.finish(ticket)
    return statistics.median(taken)


def test_a_decision_costs_less_than_hashing_its_prompt_and_hardly_more_with_many_replicas() -> None:
    """12k tokens in pages of 64 over 16 replicas; hashing is what no router could avoid, so it is the yardstick."""
    prompts = [[seed] * 12_000 for seed in range(60)]
    begin = time.thread_time()
    hashes = [page_hashes(tokens, 64, namespace_key()) for tokens in prompts]
    hashing = (time.thread_time() - begin) / len(prompts)
    few, many = Router(64), Router(64)
    for router, count in ((few, 16), (many, 1000)):
        for index in range(count):
            router.join(f"r{index}")
        for index, one in enumerate(hashes):
            router.apply(f"r{index % 16}", [CacheEvent("stored", one[: 20 + 2 * index])])
    cost_few, cost_many = median_seconds(few, hashes), median_seconds(many, hashes)
    assert cost_few < 3 * hashing, (cost_few, hashing)
    assert cost_many < 15 * cost_few, (cost_many, cost_few)
