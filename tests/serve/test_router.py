"""The choice of a replica: pure, so every case is spelled out in numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgray.protocol import CacheEvent, Load, namespace_key, page_hashes
from sgray.serve.router import Router, Ticket

PAGE = 16
NAMESPACE = namespace_key()


def prompt(*, shared: int = 0, own: int = 0, seed: int = 0) -> list[int]:
    """`shared` tokens that are the same for all seeds, then `own` tokens of this seed."""
    return list(range(shared)) + [100_000 + seed * 1000 + index for index in range(own)]


def hashes_of(tokens: list[int]) -> list[int]:
    return page_hashes(tokens, PAGE, NAMESPACE)


def router_of(count: int, policy: str = "cost") -> Router:
    router = Router(PAGE, policy)  # type: ignore[arg-type]
    for index in range(count):
        router.join(f"r{index}")
    return router


def choose(router: Router, tokens: list[int], **options: object) -> Ticket:
    ticket = router.choose(hashes_of(tokens), len(tokens), **options)  # type: ignore[arg-type]
    assert ticket is not None
    router.check()
    return ticket


def complete(router: Router, ticket: Ticket, tokens: list[int]) -> None:
    """The replica computed the prompt, stored it and finished."""
    router.start(ticket, ticket.predicted_cached)
    router.apply(ticket.replica, [CacheEvent("stored", hashes_of(tokens))])
    router.finish(ticket)
    router.check()


def test_pub_133_different_prompts_spread_evenly_over_idle_replicas() -> None:
    router = router_of(4)
    chosen: Counter[str] = Counter()
    for seed in range(40):
        tokens = prompt(own=100, seed=seed)
        ticket = choose(router, tokens)
        chosen[ticket.replica] += 1
        complete(router, ticket, tokens)
    assert len(chosen) == 4
    assert min(chosen.values()) >= 7
    assert max(chosen.values()) <= 13


def test_pub_133_different_prompts_in_flight_together_are_dealt_evenly() -> None:
    router = router_of(4)
    chosen = Counter(choose(router, prompt(own=100, seed=seed)).replica for seed in range(40))
    assert set(chosen.values()) == {10}


def test_pub_133_prompts_without_a_whole_page_spread_too() -> None:
    router = router_of(4)
    chosen: Counter[str] = Counter()
    for seed in range(40):
        ticket = choose(router, prompt(own=5, seed=seed))
        chosen[ticket.replica] += 1
        complete(router, ticket, [])
    assert len(chosen) == 4
    assert min(chosen.values()) >= 4


def test_pub_133_a_shared_prefix_stays_on_one_replica() -> None:
    router = router_of(4)
    chosen: Counter[str] = Counter()
    for seed in range(40):
        tokens = prompt(shared=200, own=20, seed=seed)
        ticket = choose(router, tokens)
        chosen[ticket.replica] += 1
        complete(router, ticket, tokens)
    assert max(chosen.values()) >= 38


def test_pub_133_a_shared_prefix_spills_once_its_home_is_clearly_busier() -> None:
    router = router_of(4)
    order = [choose(router, prompt(shared=200, own=20, seed=seed)).replica for seed in range(200)]
    home = order[0]
    first_spill = next(index for index, name in enumerate(order) if name != home)
    assert first_spill >= 4, "a small lead must not scatter the group"
    assert len(set(order)) == 4, "a large lead must"


def test_pub_133_a_busy_replica_with_a_small_tree_is_not_chosen_for_a_miss() -> None:
    router = router_of(4)
    router.report("r0", Load(running=50))
    for index in range(1, 4):
        router.replace(f"r{index}", hashes_of(prompt(own=16_000, seed=900 + index)))
    chosen = Counter(choose(router, prompt(own=100, seed=seed)).replica for seed in range(30))
    assert chosen["r0"] == 0
    assert len(chosen) == 3


def test_a_waiting_backlog_counts() -> None:
    router = router_of(2)
    router.report("r0", Load(waiting=1, waiting_tokens=50_000))
    assert {choose(router, prompt(own=100, seed=seed)).replica for seed in range(10)} == {"r1"}


def test_a_deep_match_beats_a_shallow_one() -> None:
    router = router_of(2)
    tokens = prompt(own=800)
    router.apply("r0", [CacheEvent("stored", hashes_of(tokens)[:10])])
    router.apply("r1", [CacheEvent("stored", hashes_of(tokens)[:40])])
    ticket = choose(router, tokens)
    assert (ticket.replica, ticket.predicted_cached) == ("r1", 640)


def test_pages_after_a_hole_are_not_a_match() -> None:
    router = router_of(1)
    pages = hashes_of(prompt(own=800))
    router.apply("r0", [CacheEvent("stored", pages[:3] + pages[4:])])
    assert choose(router, prompt(own=800)).predicted_cached == 48


def test_siblings_in_a_burst_see_each_others_pages_before_any_event() -> None:
    router = router_of(4)
    tokens = prompt(own=800)
    first, second = choose(router, tokens), choose(router, tokens)
    assert (first.predicted_cached, second.predicted_cached) == (0, 799)
    assert second.replica == first.replica


def test_a_promise_ends_with_its_request_unless_the_replica_stored_the_pages() -> None:
    router = router_of(1)
    lost, kept = prompt(own=160, seed=1), prompt(own=160, seed=2)
    router.finish(choose(router, lost))
    complete(router, choose(router, kept), kept)
    assert choose(router, lost).predicted_cached == 0
    assert choose(router, kept).predicted_cached == 159


def test_what_another_router_has_booked_is_a_promise_and_a_load_until_it_ends() -> None:
    router = router_of(2)
    tokens = prompt(own=800)
    pages = hashes_of(tokens)
    home = choose(router_of(2), tokens).replica
    other = "r0" if home == "r1" else "r1"
    router.book_peer(other, "a", 800, 0, pages)
    router.book_peer(other, "a", 800, 0, pages)
    router.book_peer("gone", "b", 800, 0, pages)
    router.check()
    ticket = choose(router, tokens)
    assert (ticket.replica, ticket.predicted_cached) == (other, 799)
    router.finish(ticket)
    assert choose(router, prompt(own=800, seed=1)).replica == home, "the other one has something to do"
    router.finish_peers(other, ["a", "unknown"])
    router.finish_peers("gone", ["b"])
    ticket = choose(router, tokens)
    assert (ticket.replica, ticket.predicted_cached) == (other, 0), "nobody will compute it any more"


def test_a_prompt_of_another_router_costs_what_is_neither_stored_nor_promised() -> None:
    router = router_of(1)
    tokens = prompt(own=800)
    pages = hashes_of(tokens)
    router.book_peer("r0", "a", 800, 10, pages[10:])
    assert router._replicas["r0"].unseen_uncached == 640
    router.book_peer("r0", "b", 800, 10, pages[10:])
    assert router._replicas["r0"].unseen_uncached == 641
    router.apply("r0", [CacheEvent("stored", pages)])
    router.finish_peers("r0", ["a", "b"])
    assert choose(router, tokens).predicted_cached == 799
    router.check()


def test_removed_and_cleared_pages_are_forgotten() -> None:
    router = router_of(1)
    pages = hashes_of(prompt(own=800))
    router.replace("r0", pages)
    router.apply("r0", [CacheEvent("removed", pages[5:])])
    ticket = choose(router, prompt(own=800))
    assert ticket.predicted_cached == 80
    router.finish(ticket)
    router.apply("r0", [CacheEvent("cleared")])
    assert choose(router, prompt(own=800)).predicted_cached == 0


def test_a_snapshot_replaces_the_picture() -> None:
    router = router_of(1)
    old, new = prompt(own=160, seed=1), prompt(own=160, seed=2)
    router.replace("r0", hashes_of(old))
    router.replace("r0", hashes_of(new))
    router.check()
    assert choose(router, old).predicted_cached == 0
    assert choose(router, new).predicted_cached == 159


def test_independent_routers_agree_on_the_home_of_a_cold_prefix() -> None:
    homes = [[choose(router_of(4), prompt(own=100, seed=seed)).replica for seed in range(30)] for _ in range(2)]
    assert homes[0] == homes[1]
    assert len(set(homes[0])) == 4


def test_the_choice_does_not_depend_on_the_order_of_joining() -> None:
    tokens = prompt(own=100, seed=7)
    backwards = Router(PAGE)
    for index in reversed(range(4)):
        backwards.join(f"r{index}")
    assert choose(router_of(4), tokens).replica == choose(backwards, tokens).replica


def test_excluded_replicas_are_not_chosen_and_none_is_left_at_last() -> None:
    router = router_of(2)
    tokens = prompt(own=100)
    first = choose(router, tokens)
    second = choose(router, tokens, exclude={first.replica})
    assert second.replica != first.replica
    assert router.choose(hashes_of(tokens), len(tokens), exclude={"r0", "r1"}) is None


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    router = router_of(3, "round_robin")
    tokens = prompt(own=800)
    router.replace("r1", hashes_of(tokens))
    assert [choose(router, tokens).replica for _ in range(6)] == ["r0", "r1", "r2"] * 2


def test_a_replica_that_left_is_forgotten_and_its_tickets_end_quietly() -> None:
    router = router_of(2)
    tokens = prompt(own=800)
    ticket = choose(router, tokens)
    router.leave(ticket.replica)
    router.check()
    other = choose(router, tokens)
    assert other.replica != ticket.replica
    router.join(ticket.replica)
    router.start(ticket, 0)
    router.finish(ticket)
    router.finish(ticket)
    router.check()


def test_a_new_replica_is_taken_to_be_as_fast_as_its_peers() -> None:
    router = router_of(2)
    router.report("r0", Load(prefill_tokens_per_s=50_000, decode_step_s=0.005))
    chosen = Counter(choose(router, prompt(own=4000, seed=seed)).replica for seed in range(20))
    assert set(chosen.values()) == {10}


def test_prediction_errors_are_counted() -> None:
    router = router_of(1)
    tokens = prompt(own=160)
    router.replace("r0", hashes_of(tokens)[:5])
    ticket = choose(router, tokens)
    router.start(ticket, 48)
    router.start(ticket, 48)
    router.finish(ticket)
    late = choose(router, tokens)
    router.start(late, 85)
    counters = router.counters
    assert (counters.requests, counters.prompt_tokens) == (2, 320)
    assert (counters.predicted, counters.actual) == (160, 133)
    assert (counters.missed, counters.surprises) == (32, 5)


@pytest.mark.parametrize("count", [1, 5])
def test_names_can_come_and_go_without_sharing_a_bit(count: int) -> None:
    router = router_of(count)
    for turn in range(10):
        router.leave(f"r{turn % count}")
        router.join(f"r{turn % count}")
        router.replace(f"r{turn % count}", [turn, turn + 1])
        router.check()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(0, 3), st.integers(0, 60))))
def test_any_history_keeps_the_index_consistent(history: list[tuple[int, int, int, int]]) -> None:
    router = router_of(3)
    tickets: list[Ticket] = []
    for action, replica, seed, length in history:
        name, tokens = f"r{replica}", prompt(own=length, seed=seed)
        if action == 0:
            ticket = router.choose(hashes_of(tokens), len(tokens), exclude={name})
            tickets += [ticket] if ticket else []
        elif action == 1 and tickets:
            router.finish(tickets.pop(length % len(tickets)))
        elif action == 2 and tickets:
            router.start(tickets[length % len(tickets)], length)
        elif action == 3:
            router.leave(name)
        elif action == 7:
            router.book_peer(name, str(seed), len(tokens), 0, hashes_of(tokens))
        elif action == 8:
            router.finish_peers(name, [str(seed)])
        elif name in router.replicas:
            kinds = {4: "stored", 5: "removed", 6: "cleared"}
            router.apply(name, [CacheEvent(kinds.get(action, "stored"), hashes_of(tokens))])  # type: ignore[arg-type]
        else:
            router.join(name)
        router.check()


def fork(router: Router, count: int, program: str, *, shared: int = 0) -> list[str]:
    """Where `count` siblings go, all in flight together."""
    return [choose(router, prompt(shared=shared, own=5, seed=seed), program=program).replica for seed in range(count)]


@pytest.mark.parametrize(("shared", "together"), [(200, 4), (800, 16)])
def test_the_branches_of_a_program_meet_on_one_replica_for_as_many_as_their_prefix_is_worth(
    shared: int, together: int
) -> None:
    order = fork(router_of(4), 400, "program", shared=shared)
    first_spill = next(index for index, name in enumerate(order) if name != order[0])
    assert together <= first_spill <= 2 * together and len(set(order)) > 1


def test_a_program_comes_back_to_its_home_where_nothing_speaks_against_it() -> None:
    def homes(program: str) -> set[str]:
        router, found = router_of(4), set()
        for seed in range(12):
            tokens = prompt(own=5, seed=seed)
            ticket = choose(router, tokens, program=program)
            complete(router, ticket, [])
            found.add(ticket.replica)
        return found

    assert len(homes("program")) == 1 and len(homes("")) == 4


def test_a_program_leaves_its_home_once_that_is_clearly_busier() -> None:
    router = router_of(2)
    home = fork(router, 1, "program")[0]
    router.report(home, Load(waiting=1, waiting_tokens=50_000))
    assert home not in fork(router, 10, "program")


def test_a_deeper_match_elsewhere_is_worth_more_than_a_programs_home() -> None:
    router = router_of(2)
    home = fork(router, 1, "program")[0]
    (other,) = {"r0", "r1"} - {home}
    tokens = prompt(own=800)
    router.apply(other, [CacheEvent("stored", hashes_of(tokens))])
    assert choose(router, tokens, program="program").replica == other


def test_independent_routers_agree_on_the_home_of_a_program() -> None:
    homes = {name: {fork(router_of(4), 1, name)[0] for _ in range(3)} for name in map(str, range(20))}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 4


def test_a_program_that_has_ended_is_forgotten_and_so_is_one_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgray.serve.router.MAX_PROGRAMS", 3)
    router = router_of(2)
    for name in "abcd":
        fork(router, 1, name)
    assert router.num_programs == 3
    router.end_programs(["b", "unknown"])
    assert router.num_programs == 2
