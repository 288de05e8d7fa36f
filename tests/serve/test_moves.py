"""What the next replica is asked, and what the caller sees, without any replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgray.protocol import NO_LOGPROBS, Delta, EngineInfo, Finish, Grammar, Request, SamplingParams, TokenLogprobs
from sgray.serve.moves import Journey

INFO = EngineInfo("tiny", "/models/tiny", "LlamaForCausalLM", "float32", "cpu", 256, 512, (2,), 16, 64, 8)
REQUEST = Request(
    "c-0",
    [5, 6, 7],
    SamplingParams(max_new_tokens=9, min_new_tokens=4, prompt_logprobs=1, presence_penalty=0.5),
    priority=2,
    salt="s",
    grammar=Grammar("regex", "a*"),
)


def first_delta() -> Delta:
    return Delta("c-0", [11], cached_tokens=3, prompt_logprobs=[None, TokenLogprobs(-1.0), TokenLogprobs(-2.0)])


def test_a_request_that_never_moves_is_sent_as_it_is_but_for_its_seed() -> None:
    journey = Journey(REQUEST, seed=77)
    assert journey.request == replace(REQUEST, sampling=replace(REQUEST.sampling, seed=77))
    delta = first_delta()
    assert journey.take(delta, INFO) is delta
    seeded = replace(REQUEST, sampling=SamplingParams(seed=0))
    assert Journey(seeded, seed=77).request is seeded


def test_the_next_replica_is_asked_for_the_rest_and_for_nothing_twice() -> None:
    journey = Journey(REQUEST, seed=77)
    sent = journey.request
    journey.take(first_delta(), INFO)
    journey.take(Delta("c-0", [12, 13]), INFO)
    journey.move()
    assert journey.request == replace(
        sent,
        id="c-0~1",
        tokens=[5, 6, 7, 11, 12, 13],
        num_generated=3,
        sampling=replace(sent.sampling, prompt_logprobs=NO_LOGPROBS),
    )
    assert journey.request.num_prompt == 3
    journey.move()  # the second one was lost before it said anything
    assert (journey.request.id, journey.request.num_generated) == ("c-0~2", 3)
    assert REQUEST.tokens == [5, 6, 7]


def test_the_caller_sees_one_answer() -> None:
    journey = Journey(REQUEST, seed=77)
    journey.take(first_delta(), INFO)
    journey.move()
    logprobs = [TokenLogprobs(-0.5)]
    moved = Delta("c-0~1", [12], logprobs, cached_tokens=4)
    assert journey.take(moved, INFO) == Delta("c-0", [12], logprobs)
    end = journey.take(Delta("c-0~1", [2], finish=Finish("stop", matched=2)), INFO)
    assert end == Delta("c-0", [2], finish=Finish("stop", matched=2))


def test_what_moved_before_it_began_is_asked_for_whole_and_tells_what_comes_but_once() -> None:
    journey = Journey(REQUEST, seed=77)
    journey.move()
    assert journey.request.num_generated == 0
    assert journey.request.sampling.prompt_logprobs == 1
    told = journey.take(replace(first_delta(), id="c-0~1"), INFO)
    assert told == first_delta()


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"num_pages": 9, "max_running_requests": 1, "page_size": 64, "model_name": "alias"}, True),
        ({"model_dir": "/models/other"}, False),
        ({"vocab_size": 257}, False),
        ({"end_ids": (2, 3)}, False),
        ({"context_length": 256}, False),
    ],
)
def test_it_goes_on_with_the_same_model_alone(changes: dict[str, object], fits: bool) -> None:
    journey = Journey(REQUEST, seed=77)
    other = replace(INFO, **changes)  # type: ignore[arg-type]
    assert journey.fits(other), "nothing is known of it yet"
    journey.take(first_delta(), INFO)
    assert journey.fits(other) is fits
