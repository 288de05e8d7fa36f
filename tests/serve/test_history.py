"""The latest choices of replicas, and the prefixes that are asked for most."""

from __future__ import annotations

from sgray.serve.routing.history import MAX_DECISIONS, MAX_PREFIXES, Decision, History


def test_the_latest_choices_come_first_and_learn_what_was_cached() -> None:
    history = History(clock=iter(range(1000)).__next__)
    history.placed("a", "one", 100, 64)
    history.placed("b", "two", 50, 0)
    history.started("a", 80)
    history.started("unknown", 5)
    assert history.recent(5) == [Decision(1, "two", 50, 0), Decision(0, "one", 100, 64, 80)]
    assert history.recent(1) == [Decision(1, "two", 50, 0)]
    assert (history.replica_of("a"), history.replica_of("unknown")) == ("one", None)


def test_a_request_that_moves_is_the_newest_where_it_went() -> None:
    history = History()
    for name, replica in (("a", "one"), ("b", "one"), ("a", "two")):
        history.placed(name, replica, 10, 0)
    assert [decision.replica for decision in history.recent(9)] == ["two", "one"]
    assert history.replica_of("a") == "two"


def test_memory_is_bounded_whatever_is_asked() -> None:
    history = History()
    for number in range(2 * MAX_DECISIONS):
        history.placed(f"{number}", "one", 10, 0)
        history.asked([1000 + 3 * number, 1001 + 3 * number, 7], 16)
        history.asked([5, 6], 16)
    assert len(history.recent(10**6)) == MAX_DECISIONS
    assert len(history._prefixes) <= MAX_PREFIXES
    assert [prefix.hash for prefix in history.hot(5)] == [6]


def test_a_prefix_is_told_once_at_its_full_length() -> None:
    history = History()
    for number in range(10):
        history.asked([1, 2, 3, 4, 50 + number, 60 + number, 70 + number, 80 + number], 64)  # four pages in common
    for number in range(4):
        history.asked([9, 100 + number], 64)
    history.asked([11, 12], 64)
    found = [(prefix.hash, prefix.num_tokens, prefix.num_requests) for prefix in history.hot(10)]
    assert found == [(4, 256, 10), (9, 64, 4)]


def test_a_branch_that_many_leave_is_told_beside_what_goes_on() -> None:
    history = History()
    for number in range(10):
        history.asked([1, 2] if number < 5 else [1, 20 + number], 64)
    assert [(prefix.hash, prefix.num_requests, prefix.parent) for prefix in history.hot(10)] == [
        (1, 10, None),
        (2, 5, 1),
    ]


def test_the_parent_that_is_told_is_one_that_is_told() -> None:
    history = History()
    for number in range(12):
        history.asked([1, 2, 3 + number // 6, 4 + number // 6], 64)  # 1 and 2 are one, then two go on
    found = {prefix.hash: prefix.parent for prefix in history.hot(10)}
    assert found == {2: None, 4: 2, 5: 2}
    assert {prefix.hash: prefix.parent for prefix in history.hot(2)} == {2: None, 4: 2}


def test_prompts_without_a_whole_page_are_not_counted() -> None:
    history = History()
    history.asked([], 64)
    history.asked([], 64)
    assert history.hot(10) == []
