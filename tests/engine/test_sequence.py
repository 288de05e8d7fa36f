"""One request's life: counting, stopping, what goes into a delta."""

from __future__ import annotations

import pytest

from sgray.engine.sequence import Sequence, failure
from sgray.errors import EngineError
from sgray.protocol import Finish, Request, SamplingParams, TokenLogprobs


def sequence(prompt: list[int], *, ends: tuple[int, ...] = (), **sampling: object) -> Sequence:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Sequence(
        Request("r", prompt, params),
        number=1,
        arrival=0.0,
        seed=0,
        namespace=b"",
        hashes=[],
        max_length=len(prompt) + params.max_new_tokens,
        stop_ids=frozenset(ends),
    )


def draw(it: Sequence, token: int) -> None:
    """A step that draws is planned, and answered."""
    it.num_pending += 1
    it.accept(token)


def entries(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value) for value in values]


def test_counts_follow_the_tokens() -> None:
    it = sequence([5, 6, 7], max_new_tokens=2)
    assert (it.num_prompt, it.num_generated, it.num_remaining) == (3, 0, 3)
    it.num_computed = 3
    draw(it, 9)
    assert (it.num_prompt, it.num_generated, it.num_remaining, it.finish) == (3, 1, 1, None)
    draw(it, 9)
    assert it.finish == Finish("length")


def test_a_pending_token_counts_as_one_to_compute_and_as_one_drawn() -> None:
    it = sequence([5, 6, 7], max_new_tokens=3)
    it.num_computed, it.num_pending = 3, 1
    assert (it.num_generated, it.num_remaining, it.may_grow) == (0, 1, True)
    it.num_computed, it.num_pending = 4, 2
    assert (it.num_generated, it.num_remaining) == (0, 1)
    it.accept(9)
    assert (it.tokens, it.num_pending, it.num_remaining, it.may_grow) == ([5, 6, 7, 9], 1, 1, True)
    it.num_pending = 2
    assert not it.may_grow and it.finish is None, "the last one is drawn and not known yet"


def test_the_request_keeps_its_own_prompt() -> None:
    prompt = [1, 2]
    it = sequence(prompt)
    draw(it, 3)
    assert prompt == [1, 2] and it.request.tokens == [1, 2]


def test_an_end_id_ends_it_and_is_named_also_at_the_last_token() -> None:
    it = sequence([1], ends=(2, 3), max_new_tokens=1)
    draw(it, 3)
    assert it.finish == Finish("stop", matched=3)


def test_no_end_before_min_new_tokens() -> None:
    it = sequence([1], ends=(2,), min_new_tokens=2)
    for _ in range(2):
        draw(it, 2)
        assert it.finish is None
    draw(it, 2)
    assert it.finish == Finish("stop", matched=2)


def test_only_the_first_delta_tells_cached_tokens() -> None:
    it = sequence([1, 2], max_new_tokens=2)
    it.num_cached = 1
    draw(it, 4)
    first = it.delta([4], [])
    draw(it, 5)
    second = it.delta([5], [])
    assert (first.cached_tokens, first.finish) == (1, None)
    assert (second.cached_tokens, second.finish) == (None, Finish("length"))


def test_a_sequence_that_never_ran_has_no_cached_tokens() -> None:
    it = sequence([1])
    it.finish = Finish("abort")
    assert it.delta([], []).cached_tokens == 0


def test_logprobs_are_there_only_when_asked_for() -> None:
    assert sequence([1]).delta([4], []).logprobs is None
    assert sequence([1], logprobs=0).delta([4], entries(-1)).logprobs == entries(-1)
    assert sequence([1], logprobs=3).delta([], []).logprobs == []


def test_prompt_logprobs_are_collected_over_chunks_without_gap_or_repeat() -> None:
    it = sequence([1, 2, 3, 4, 5], prompt_logprobs=0)
    assert it.max_cached == 0
    it.collect_prompt_logprobs(0, entries(-1, -2))
    assert it.max_cached == 2
    it.collect_prompt_logprobs(1, entries(-2, -3))  # begun again after a retraction
    it.collect_prompt_logprobs(3, entries(-4))
    assert it.max_cached == 4
    draw(it, 6)
    assert it.delta([6], []).prompt_logprobs == [None, *entries(-1, -2, -3, -4)]
    draw(it, 7)
    assert it.delta([7], []).prompt_logprobs is None
    assert it.max_cached == 6


def test_prompt_logprobs_that_are_not_complete_are_not_sent() -> None:
    it = sequence([1, 2, 3], prompt_logprobs=0)
    it.finish = Finish("abort")
    assert it.delta([], []).prompt_logprobs is None


def test_the_most_that_may_be_cached_leaves_one_token() -> None:
    assert sequence([1, 2, 3]).max_cached == 2


def test_a_failure_carries_the_error_as_data() -> None:
    finish = failure(EngineError("no luck", param="x"))
    assert finish.reason == "error" and finish.error is not None
    assert (finish.error.status, finish.error.code, finish.error.message, finish.error.param) == (
        500,
        "engine_error",
        "no luck",
        "x",
    )


@pytest.mark.parametrize("count", [0, 1, 5])
def test_may_grow_ends_at_the_length_asked_for(count: int) -> None:
    it = sequence([1, 2], max_new_tokens=count)
    for _ in range(count):
        assert it.may_grow
        draw(it, 9)
    assert not it.may_grow
