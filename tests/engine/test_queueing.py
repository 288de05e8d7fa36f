"""The queue when it is full: by requests, by tokens; who gives way to whom; and who waits in vain."""

from __future__ import annotations

import pytest
from fake_model import Rig, solo

from sgray.errors import QueueFullError
from sgray.protocol import Finish


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * position) % 90 for position in range(length)]


def busy_rig(**changes: int) -> Rig:
    """One sequence runs for long, and nothing else can."""
    rig = Rig(**{"num_pages": 200, "max_running": 1, **changes})
    rig.add("running", [1, 2, 3], max_new_tokens=60)
    rig.step()
    return rig


def error_of(rig: Rig, name: str) -> tuple[int, str | None]:
    finish = rig.outputs[name].finish
    assert finish is not None and finish.error is not None
    return finish.error.status, finish.error.code


# ---- tokens


def test_the_queue_is_full_by_tokens_as_well() -> None:
    rig = busy_rig(max_queued_tokens=100)
    rig.add("a", prompt(1, 60))
    with pytest.raises(QueueFullError, match=r"101 tokens are to be computed.*100 tokens") as caught:
        rig.add("b", prompt(2, 41))
    assert (caught.value.status, caught.value.type, caught.value.code) == (429, "overloaded_error", "queue_full")
    rig.add("c", prompt(3, 40))
    rig.run()
    assert rig.outputs["c"].finish == Finish("length")
    assert rig.generate("b", prompt(2, 41), max_new_tokens=3).tokens == solo(prompt(2, 41), 3)
    assert rig.scheduler.load().refused == 1


def test_one_prompt_larger_than_the_bound_is_taken_where_nobody_waits() -> None:
    rig = busy_rig(max_queued_tokens=10)
    rig.add("large", prompt(1, 90), max_new_tokens=2)
    with pytest.raises(QueueFullError):
        rig.add("small", [5], max_new_tokens=2)
    rig.run()
    assert rig.outputs["large"].tokens == solo(prompt(1, 90), 2)


def test_cached_tokens_do_not_count() -> None:
    rig = Rig(page_size=4, max_running=1, max_queued_tokens=10)
    rig.generate("before", prompt(1, 80), max_new_tokens=2)
    rig.add("running", [1, 2, 3], max_new_tokens=50)
    rig.step()
    for number in range(3):
        rig.add(f"{number}", [*prompt(1, 80), number, 5, 6], max_new_tokens=2)
    with pytest.raises(QueueFullError, match="12 tokens"):
        rig.add("more", [*prompt(1, 80), 9, 9, 9], max_new_tokens=2)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_several_have_in_common_counts_once(page_size: int) -> None:
    rig = busy_rig(page_size=page_size, max_queued_tokens=150, num_pages=800 // page_size)
    for number in range(10):
        rig.add(f"{number}", [*prompt(1, 96), number, 5], max_new_tokens=2)
    for number in range(10):
        rig.abort(f"{number}")
    rig.add("again", prompt(2, 140), max_new_tokens=2)
    with pytest.raises(QueueFullError):
        rig.add("more", prompt(3, 20), max_new_tokens=2)
    rig.run()
    assert rig.outputs["again"].tokens == solo(prompt(2, 140), 2)


def test_without_a_cache_everything_counts() -> None:
    rig = busy_rig(disabled=True, max_queued_tokens=100)
    rig.add("a", prompt(1, 60))
    with pytest.raises(QueueFullError, match="120 tokens"):
        rig.add("b", prompt(1, 60))


def test_the_refusal_says_when_to_come_again_by_the_measured_speed() -> None:
    rig = Rig(depth=1, max_running=1, max_queued_tokens=1000)
    with_unknown_speed = busy_rig(max_queued=0)
    with pytest.raises(QueueFullError) as caught:
        with_unknown_speed.add("a", [1])
    assert caught.value.retry_after_s == 1
    rig.generate("measured", prompt(1, 640), max_new_tokens=1)
    speed = rig.scheduler.load().prefill_tokens_per_s
    rig.add("running", [1, 2, 3], max_new_tokens=50)
    rig.step()
    rig.add("waits", prompt(2, 999))
    with pytest.raises(QueueFullError) as caught:
        rig.add("refused", prompt(3, 10))
    assert caught.value.retry_after_s == max(1, min(60, -(-999 // int(speed)))) > 0


# ---- priorities


def test_the_least_important_and_youngest_gives_way_and_is_told() -> None:
    rig = busy_rig(max_queued=3)
    for name, priority in (("old", 0), ("low", -1), ("young", 0)):
        rig.add(name, prompt(len(name), 5), priority=priority, max_new_tokens=3)
    rig.add("first", [7], priority=1, max_new_tokens=3)
    rig.take(rig.scheduler.drain())
    assert error_of(rig, "low") == (429, "queue_full")
    rig.add("second", [8], priority=1, max_new_tokens=3)
    rig.take(rig.scheduler.drain())
    assert error_of(rig, "young") == (429, "queue_full")
    for name, priority in (("equal", 0), ("lower", -5)):
        with pytest.raises(QueueFullError):
            rig.add(name, [9], priority=priority)
    rig.run()
    for name in ("old", "first", "second"):
        assert rig.outputs[name].finish == Finish("length")


def test_a_large_one_displaces_as_many_as_it_needs_or_none() -> None:
    rig = busy_rig(max_queued_tokens=100)
    for number in range(4):
        rig.add(f"{number}", prompt(number + 1, 24), priority=number // 3, max_new_tokens=2)
    with pytest.raises(QueueFullError):
        rig.add("too large", prompt(9, 90), priority=1)
    rig.take(rig.scheduler.drain())
    assert all(rig.outputs[f"{number}"].finish is None for number in range(4))
    rig.add("large", prompt(9, 40), priority=1, max_new_tokens=2)
    rig.take(rig.scheduler.drain())
    assert [rig.outputs[f"{number}"].finish is None for number in range(4)] == [True, False, False, True]
    rig.run()
    assert rig.outputs["large"].tokens == solo(prompt(9, 40), 2)


def test_one_that_has_streamed_is_not_sent_away() -> None:
    rig = Rig(num_pages=20, page_size=4, max_running=2, max_queued=0, lookahead=0)
    rig.add("a", prompt(1, 20), max_new_tokens=50)
    rig.add("b", prompt(2, 20), max_new_tokens=50)
    while not rig.scheduler.load().retracted:
        rig.step()
    assert rig.scheduler.load().waiting == 1
    with pytest.raises(QueueFullError):
        rig.add("c", [2], priority=5)
    rig.run()
    assert all(rig.outputs[name].finish == Finish("length") for name in "ab")


# ---- deadlines


@pytest.mark.parametrize("depth", [0, 1])
def test_one_that_waits_beyond_its_deadline_is_ended_there(depth: int) -> None:
    rig = Rig(depth=depth, max_running=1)
    rig.add("running", [1, 2, 3], max_new_tokens=80)
    rig.step()
    rig.add("short", [4], timeout_s=0.5, max_new_tokens=2)
    rig.add("long", [5], timeout_s=500.0, max_new_tokens=2)
    rig.add("endless", [6], max_new_tokens=2)
    before = rig.now
    while rig.outputs["short"].finish is None:
        rig.step()
    assert 0.5 < rig.now - before < 0.55
    assert error_of(rig, "short") == (408, "request_timeout")
    rig.run()
    for name, token in (("long", 5), ("endless", 6)):
        assert rig.outputs[name].tokens == solo([token], 2)


def test_a_deadline_does_not_end_what_runs() -> None:
    rig = Rig()
    assert rig.generate("a", [1], timeout_s=0.05, max_new_tokens=50).finish == Finish("length")


def test_a_prompt_that_cannot_be_done_in_time_is_not_begun() -> None:
    rig = Rig(depth=1, num_pages=1000, max_running=1, checks=False)
    rig.generate("measured", prompt(1, 640), max_new_tokens=1)  # 64 tokens in 0.01 s
    computed = rig.executor.num_computed
    rig.add("hopeless", prompt(2, 2000), timeout_s=0.2)
    rig.add("possible", prompt(3, 2000), timeout_s=60.0, max_new_tokens=2)
    rig.step()
    assert error_of(rig, "hopeless") == (408, "request_timeout")
    rig.run()
    assert rig.outputs["possible"].tokens == solo(prompt(3, 2000), 2)
    assert rig.executor.num_computed == computed + 2001


def test_short_prompts_do_not_make_a_long_one_look_hopeless() -> None:
    """A step takes its time however little is in it, so the speed of short prompts says nothing of a long one."""
    rig = Rig(depth=1, num_pages=1000, max_running=1, checks=False)
    for number in range(50):
        rig.generate(f"{number}", [number, number], max_new_tokens=1)
    assert 0 < rig.scheduler.load().prefill_tokens_per_s < 250
    assert rig.generate("long", prompt(2, 2000), timeout_s=5.0, max_new_tokens=2).finish == Finish("length")


def test_what_is_cached_by_then_counts_as_done() -> None:
    rig = Rig(depth=1, num_pages=1000, max_running=2, checks=False)
    rig.generate("measured", prompt(1, 640), max_new_tokens=1)
    rig.add("first", prompt(2, 2000), max_new_tokens=1)
    rig.step()
    rig.add("sibling", prompt(2, 2000), timeout_s=0.45, max_new_tokens=2)  # waits for the first one's pages
    rig.run()
    assert rig.outputs["sibling"].tokens == solo(prompt(2, 2000), 2)


# ---- everything at once


@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_leave_the_books_right(seed: int) -> None:
    """The rig proves the books after every act."""
    rig = Rig(num_pages=60, page_size=4, max_running=3, max_queued=4, max_queued_tokens=120, budget=16)
    refused = 0
    for number in range(150):
        size = (number * 37 + seed * 11) % 50 + 1
        try:
            rig.add(
                f"{number}",
                prompt((number + seed) % 4, size),
                priority=(number * 7 + seed) % 3,
                timeout_s=None if number % 3 else 0.05 * (number % 10),
                max_new_tokens=1 + number % 9,
            )
        except QueueFullError:
            refused += 1
        if number % 2:
            rig.step()
    rig.run()
    reasons = {output.finish.reason for output in rig.outputs.values() if output.finish is not None}
    assert refused and reasons == {"length", "error"} and len(rig.outputs) == 150 - refused
    for name, output in rig.outputs.items():
        if output.finish == Finish("length") and output.tokens:
            number = int(name)
            size = (number * 37 + seed * 11) % 50 + 1
            assert output.tokens == solo(prompt((number + seed) % 4, size), 1 + number % 9)
