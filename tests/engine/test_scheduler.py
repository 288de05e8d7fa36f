"""The scheduler with a model that watches the pages: order, budget, memory, sharing, ends, and what is told."""

from __future__ import annotations

import pytest
from fake_model import VOCAB_SIZE, Output, Rig, logprob, mix, solo

from sgray.engine.plan import StepPlan
from sgray.engine.scheduler import PROGRAM_SILENCE_S
from sgray.errors import ContextLengthError, EngineError, InvalidRequestError, OverloadedError
from sgray.protocol import Finish, SamplingParams, TokenLogprobs, Trail

at_both_depths = pytest.mark.parametrize("depth", [0, 1])


def prompt(seed: int, length: int) -> list[int]:
    return [mix(seed, position) % VOCAB_SIZE for position in range(length)]


def prompt_logprobs(tokens: list[int]) -> list[TokenLogprobs | None]:
    """What the fake model says of a prompt."""
    state, values = mix(0, tokens[0]), []
    for token in tokens[1:]:
        values.append(logprob(state, token))
        state = mix(state, token)
    return [None, *values]


def bound(max_running: int, budget: int) -> int:
    """The documented bound: steps within which a decoding sequence gets a token."""
    return -(-max_running // (budget - max(1, budget // 4)))


# ---- equalities


@at_both_depths
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [2, 7, 64, 1000])
def test_chunked_equals_whole(page_size: int, budget: int, depth: int) -> None:
    rig = Rig(depth=depth, page_size=page_size, budget=budget)
    assert rig.generate("a", prompt(1, 90), max_new_tokens=10).tokens == solo(prompt(1, 90), 10)
    assert rig.executor.num_computed == 99


@at_both_depths
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cached_equals_uncached(page_size: int, disabled: bool, depth: int) -> None:
    rig = Rig(depth=depth, page_size=page_size, disabled=disabled)
    first = rig.generate("a", prompt(1, 90), max_new_tokens=10)
    second = rig.generate("b", prompt(1, 90), max_new_tokens=10)
    assert first.tokens == second.tokens == solo(prompt(1, 90), 10)
    assert (first.cached, second.cached) == (0, 0 if disabled else 89)


@at_both_depths
def test_batched_equals_alone(depth: int) -> None:
    rig = Rig(depth=depth, budget=50)
    for number in range(20):
        rig.add(f"{number}", prompt(number % 5, 10 + 7 * number), max_new_tokens=5 + number)
    rig.run()
    for number in range(20):
        assert rig.outputs[f"{number}"].tokens == solo(prompt(number % 5, 10 + 7 * number), 5 + number)


def test_a_seed_alone_fixes_the_draw() -> None:
    hot = {"temperature": 1.0, "max_new_tokens": 8}
    alone = Rig().generate("a", [1, 2, 3], seed=42, **hot)
    rig = Rig()
    for number in range(5):
        rig.add(f"x{number}", [1, 2, number], **hot)
    rig.add("a", [1, 2, 3], seed=42, **hot)
    rig.run()
    assert (
        alone.tokens == rig.outputs["a"].tokens == solo([1, 2, 3], 8, seed=42, sampling=SamplingParams(temperature=1))
    )


def test_seeds_are_drawn_for_requests_without_one_and_can_be_fixed() -> None:
    def texts(random_seed: int | None) -> list[list[int]]:
        rig = Rig(random_seed=random_seed)
        return [rig.generate(f"{n}", [1, 2], temperature=1.0, max_new_tokens=6).tokens for n in range(4)]

    assert texts(7) == texts(7)
    assert len({tuple(tokens) for tokens in texts(7)}) == 4
    assert texts(None) != texts(None)


# ---- cache hits and sharing


@at_both_depths
def test_pub_099_the_answer_can_be_hit_but_for_its_last_token(depth: int) -> None:
    rig = Rig(depth=depth, page_size=1)
    text = prompt(1, 200)
    outputs = [rig.generate(f"{n}", text, max_new_tokens=20) for n in range(3)]
    assert len({tuple(output.tokens) for output in outputs}) == 1
    assert [output.cached for output in outputs] == [0, 199, 199]
    turn = rig.generate("turn", [*text, *outputs[0].tokens, *prompt(2, 10)], max_new_tokens=5)
    assert turn.cached == 219
    assert turn.tokens == solo([*text, *outputs[0].tokens, *prompt(2, 10)], 5)


@at_both_depths
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pub_100_sixteen_at_once_equal_one_alone_and_compute_their_prompt_once(page_size: int, depth: int) -> None:
    rig = Rig(depth=depth, page_size=page_size, num_pages=4096 // page_size, max_running=16, budget=128)
    text = prompt(1, 300)
    for number in range(16):
        rig.add(f"{number}", text, max_new_tokens=40)
    rig.run()
    assert all(rig.outputs[f"{n}"].tokens == solo(text, 40) for n in range(16))
    cached = min(299, 300 // page_size * page_size)
    assert [rig.outputs[f"{n}"].cached for n in range(16)] == [0] + [cached] * 15
    assert rig.executor.num_computed == 300 + 15 * (300 - cached) + 16 * 39
    tails = [[*prompt(2, 250), *prompt(100 + n, 50)] for n in range(16)]
    for number, tail in enumerate(tails):
        rig.add(f"t{number}", tail, max_new_tokens=40)
    rig.run()
    assert all(rig.outputs[f"t{n}"].tokens == solo(tail, 40) for n, tail in enumerate(tails))
    assert [rig.outputs[f"t{n}"].cached for n in range(16)] == [0] + [250] * 15
    assert rig.cache.num_leased == 0


@at_both_depths
def test_a_long_shared_prefix_is_waited_for_and_others_pass_meanwhile(depth: int) -> None:
    rig = Rig(depth=depth, page_size=4, budget=16)
    rig.add("first", prompt(1, 100), max_new_tokens=2)
    rig.step()
    rig.add("sibling", [*prompt(1, 80), 5], max_new_tokens=2)
    rig.add("other", [7] * 5, max_new_tokens=2)
    while rig.outputs["first"].cached is None:
        rig.step()
    assert rig.outputs["other"].finish is None and rig.executor.num_computed <= 100 + 5 + 2
    rig.run()
    assert rig.outputs["sibling"].cached == 80
    assert rig.outputs["sibling"].tokens == solo([*prompt(1, 80), 5], 2)


@at_both_depths
@pytest.mark.parametrize("end", ["abort", "error"])
def test_siblings_go_on_when_the_one_they_wait_for_is_lost(end: str, depth: int) -> None:
    rig = Rig(depth=depth, page_size=4, budget=16)
    for number in range(4):
        rig.add(f"{number}", prompt(1, 100), max_new_tokens=3)
    rig.step()
    rig.step()
    assert rig.scheduler.load().running == 1
    if end == "abort":
        rig.abort("0")
    else:
        rig.executor.bad_tokens = set(prompt(1, 100))
        rig.step()
        rig.executor.bad_tokens = set()
    rig.run()
    finish = rig.outputs["0"].finish
    assert finish is not None and finish.reason == end
    assert all(rig.outputs[f"{n}"].tokens == solo(prompt(1, 100), 3) for n in (1, 2, 3))


def test_salts_keep_callers_apart() -> None:
    rig = Rig()
    assert [
        rig.generate(f"{n}", prompt(1, 50), salt=salt).cached for n, salt in enumerate(["", "a", "b", "a", ""])
    ] == [
        0,
        0,
        0,
        49,
        49,
    ]


def test_siblings_in_different_salts_do_not_wait_for_each_other() -> None:
    rig = Rig(budget=200)
    rig.add("a", prompt(1, 50), salt="a")
    rig.add("b", prompt(1, 50), salt="b")
    rig.step()
    assert rig.scheduler.load().running == 2


# ---- order and budget


def test_pub_101_decoding_goes_on_in_every_step_while_prompts_keep_arriving() -> None:
    rig = Rig(num_pages=4000, page_size=16, budget=256, max_running=16, max_queued=1000, checks=False)
    for number in range(4):
        rig.add(f"d{number}", prompt(number, 20), max_new_tokens=600)
    rig.step()
    before = rig.executor.num_computed
    for number in range(500):
        rig.add(f"p{number}", prompt(1000 + number, 2000), max_new_tokens=4)
        counts = [len(rig.outputs[f"d{n}"].tokens) for n in range(4)]
        rig.step()
        assert [len(rig.outputs[f"d{n}"].tokens) for n in range(4)] == [count + 1 for count in counts]
    assert bound(16, 256) == 1
    assert rig.executor.num_computed - before > 500 * 200, "the prompts move on as well"
    rig.scheduler.check()


@pytest.mark.parametrize(("max_running", "budget"), [(16, 8), (10, 2), (12, 12)])
def test_more_decoding_than_budget_take_turns_within_the_documented_bound(max_running: int, budget: int) -> None:
    rig = Rig(num_pages=4000, budget=budget, max_running=max_running, max_queued=1000)
    for number in range(max_running - 1):
        rig.add(f"d{number}", [number], max_new_tokens=60)
    while any(len(rig.outputs[f"d{n}"].tokens) == 0 for n in range(max_running - 1)):
        rig.step()
    last, moved = dict.fromkeys(rig.outputs, rig.now), rig.now
    for number in range(100):
        rig.add(f"p{number}", prompt(number, 40), max_new_tokens=1)
        counts = {name: len(output.tokens) for name, output in rig.outputs.items()}
        computed = rig.executor.num_computed
        plan = rig.step()
        assert plan is not None
        if any(rig.executor.slots[slot].admission.num_prompt == 40 for slot in plan.slots):
            moved = rig.now
        assert rig.now - moved < 0.01 * (bound(max_running, budget) + 0.5), "the prompts move on as well"
        assert rig.executor.num_computed - computed <= budget
        for name, since in list(last.items()):
            if rig.outputs[name].finish is not None:
                del last[name]
            elif len(rig.outputs[name].tokens) > counts[name]:
                last[name] = rig.now
            else:
                assert rig.now - since < 0.01 * (bound(max_running, budget) + 0.5)


def test_pub_103_four_cold_prompts_all_run_after_their_prefill() -> None:
    rig = Rig(num_pages=4000, budget=256, max_running=4)
    for number in range(4):
        rig.add(f"{number}", prompt(number, 600), max_new_tokens=50)
    steps = 0
    while any(not rig.outputs[f"{n}"].tokens for n in range(4)):
        rig.step()
        steps += 1
    assert steps <= -(-2400 // 192) + 1
    assert rig.scheduler.load().running == 4
    assert all(rig.outputs[f"{n}"].finish is None for n in range(4))


def test_one_step_holds_chunks_of_several_prompts_and_the_oldest_goes_first() -> None:
    rig = Rig(budget=64)
    for number in range(3):
        rig.add(f"{number}", prompt(number, 50), max_new_tokens=1)
    plans = [rig.step() for _ in range(3)]
    assert [plan.lengths for plan in plans if plan] == [[50, 14], [36, 28], [22]]


def test_beside_decoding_sequences_a_step_computes_only_so_much_of_prompts() -> None:
    rig = Rig(budget=64, mixed=10)
    for number in range(2):
        rig.add(f"{number}", prompt(number, 50), max_new_tokens=20)
    assert [plan.lengths for plan in (rig.step(), rig.step()) if plan] == [[50, 14], [1, 10]]
    rig.add("late", prompt(3, 50), max_new_tokens=1)
    lengths = [plan.lengths for plan in (rig.step() for _ in range(8)) if plan]
    assert lengths == [[1, 10], [1, 10], [1, 6, 4], [1, 1, 10], [1, 1, 10], [1, 1, 10], [1, 1, 10], [1, 1, 6]]


def test_beside_decoding_sequences_a_step_computes_more_of_prompts_while_much_of_them_waits() -> None:
    rig = Rig(budget=64, mixed=10, most_mixed=24, max_running=2)
    rig.add("stream", [1], max_new_tokens=30)
    rig.step()
    for number in range(2):  # one of them waits for a place, and counts as well
        rig.add(f"{number}", prompt(number, 250), max_new_tokens=1)
    expected: list[int] = []
    while (done := sum(expected)) < 250:
        expected.append(min(max(10, min(24, (500 - done) // 16)), 250 - done))
    assert [plan.lengths[1] for plan in (rig.step() for _ in expected) if plan] == expected


def test_a_place_that_becomes_free_is_filled_in_the_next_step() -> None:
    rig = Rig(max_running=1)
    for number in range(3):
        rig.add(f"{number}", [number + 1], max_new_tokens=2)
    assert rig.run() == 6


def test_higher_priority_goes_first() -> None:
    rig = Rig(max_running=1)
    rig.add("low", [1], priority=-1, max_new_tokens=1)
    rig.add("middle", [2], max_new_tokens=1)
    rig.add("high", [3], priority=9, max_new_tokens=1)
    ends = []
    while rig.scheduler.has_work:
        rig.step()
        ends += [name for name, output in rig.outputs.items() if output.finish and name not in ends]
    assert ends == ["high", "middle", "low"]


def test_the_longest_prefix_policy_takes_the_cached_prompt_first() -> None:
    rig = Rig(max_running=1, policy="lpm")
    rig.generate("warm", prompt(1, 50), max_new_tokens=1)
    rig.add("cold", prompt(2, 50), max_new_tokens=1)
    rig.add("hot", prompt(1, 50), max_new_tokens=1)
    rig.step()
    assert rig.outputs["hot"].finish and not rig.outputs["cold"].finish


def test_a_large_prompt_at_the_head_is_not_overtaken_for_want_of_memory() -> None:
    rig = Rig(num_pages=30, page_size=4, budget=200)
    rig.add("running", prompt(1, 60), max_new_tokens=20)
    rig.step()
    rig.add("large", prompt(2, 80), max_new_tokens=2)
    rig.add("small", prompt(3, 8), max_new_tokens=2)
    while not rig.outputs["running"].finish:
        assert not rig.outputs["small"].deltas
        rig.step()
    rig.run()
    assert rig.outputs["large"].tokens == solo(prompt(2, 80), 2)


# ---- memory


@at_both_depths
def test_pub_104_retracted_equals_undisturbed(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=150, page_size=4, budget=256)  # 600 tokens; together they need 1050
    for number in range(3):
        rig.add(f"{number}", prompt(number, 50), max_new_tokens=300, logprobs=0, ignore_eos=True)
    rig.run()
    load = rig.scheduler.load()
    assert load.retracted > 0 and (load.prompt_tokens, load.generation_tokens) == (150, 900)
    for number in range(3):
        output = rig.outputs[f"{number}"]
        assert output.tokens == solo(prompt(number, 50), 300) and len(output.logprobs) == 300
        assert output.finish == Finish("length") and output.cached == 0
        assert all(len(delta.tokens) == 1 for delta in output.deltas)
    assert rig.executor.num_computed < 1.5 * 1050, "what was computed before a retraction is mostly found again"


@at_both_depths
@pytest.mark.parametrize("lookahead", [0, 64])
def test_retraction_does_not_thrash(lookahead: int, depth: int) -> None:
    rig = Rig(depth=depth, num_pages=400, page_size=1, budget=64, max_running=8, lookahead=lookahead)
    for number in range(8):
        rig.add(f"{number}", prompt(number, 10), max_new_tokens=190)
    rig.run()
    assert all(rig.outputs[f"{n}"].tokens == solo(prompt(n, 10), 190) for n in range(8))
    assert rig.scheduler.load().retracted <= 24
    assert rig.executor.num_computed < 2 * 8 * 200


@at_both_depths
def test_the_retracted_one_is_the_youngest_and_comes_back_before_those_who_wait_past_a_full_queue(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=40, page_size=4, budget=256, max_running=2, max_queued=2, lookahead=0)
    rig.add("old", prompt(1, 60), max_new_tokens=90)
    rig.add("young", prompt(2, 60), max_new_tokens=40)
    rig.step()
    rig.add("w1", prompt(3, 8), max_new_tokens=2)
    rig.add("w2", prompt(4, 8), max_new_tokens=2)
    while not rig.scheduler.load().retracted:
        rig.step()
    assert rig.scheduler.load().running == 1 and not rig.outputs["w1"].deltas
    while not (plan := rig.step()) or not plan.admissions:
        pass
    assert plan.admissions[0].num_prompt == 60, "the retracted one is the first to come in"
    assert plan.admissions[0].tokens[60:] == solo(prompt(2, 60), len(plan.admissions[0].tokens) - 60) != []
    rig.run()
    assert rig.outputs["old"].tokens == solo(prompt(1, 60), 90)
    assert rig.outputs["young"].tokens == solo(prompt(2, 60), 40)
    assert rig.outputs["w2"].finish == Finish("length")


@at_both_depths
def test_pub_105_a_request_that_uses_up_the_memory_alone_ends_by_length_and_the_next_one_runs(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=50, page_size=4)
    output = rig.generate("a", prompt(1, 50), max_new_tokens=1000, ignore_eos=True)
    assert output.finish == Finish("length")
    assert output.tokens == solo(prompt(1, 50), 151), "every page is used, and one token needs none"
    assert rig.generate("b", [1, 2, 3], max_new_tokens=5).tokens == solo([1, 2, 3], 5)


def test_pub_066_impossible_prompts_are_refused_and_long_answers_end() -> None:
    rig = Rig(num_pages=32, page_size=16)
    with pytest.raises(ContextLengthError, match=r"512 tokens.*600 tokens"):
        rig.add("a", prompt(1, 600), max_new_tokens=1)
    assert rig.generate("b", prompt(2, 100), max_new_tokens=1000, ignore_eos=True).finish == Finish("length")
    assert len(rig.generate("c", prompt(3, 10), max_new_tokens=5).tokens) == 5


@at_both_depths
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_as_large_as_the_memory_gives_one_token(page_size: int, depth: int) -> None:
    rig = Rig(depth=depth, num_pages=64 // page_size, page_size=page_size)
    for name in ("cold", "warm"):
        output = rig.generate(name, prompt(1, 64), max_new_tokens=9)
        assert output.tokens == solo(prompt(1, 64), 1) and output.finish == Finish("length")


@at_both_depths
def test_a_copy_that_would_hold_too_much_does_not_block_a_large_prompt(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=8, page_size=4)
    rig.generate("a", prompt(1, 32), max_new_tokens=1)
    text = [*prompt(1, 6), *prompt(2, 26)]
    assert rig.generate("b", text, max_new_tokens=1).tokens == solo(text, 1)


@at_both_depths
def test_a_sequence_with_pages_of_its_own_beside_equal_ones_can_still_use_the_whole_memory(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=9, page_size=4, lookahead=0)
    rig.generate("a", prompt(1, 16), max_new_tokens=1)
    output = rig.generate("b", prompt(1, 16), max_new_tokens=100)  # its last page is a copy, and then a duplicate
    assert output.tokens == solo(prompt(1, 16), 36 - 16 + 1)


def test_a_sequence_that_outgrew_the_memory_while_it_shared_it_ends_by_length() -> None:
    rig = Rig(num_pages=6, page_size=4, lookahead=0)
    rig.add("old", prompt(1, 16), max_new_tokens=5)
    rig.step()
    rig.add("young", [*prompt(1, 16), 1], max_new_tokens=50)
    [old] = rig.scheduler._running
    old.waits.add("result")
    while not rig.scheduler.load().retracted:
        rig.step()
    assert len(rig.outputs["young"].tokens) == 8, "17 + 8 tokens do not fit in 24 any more"
    old.waits.discard("result")
    rig.run()
    assert rig.outputs["old"].tokens == solo(prompt(1, 16), 5)
    assert rig.outputs["young"].tokens == solo([*prompt(1, 16), 1], 8)
    assert rig.outputs["young"].finish == Finish("length")


def test_whoever_waits_is_passed_by_and_runs_when_nothing_is_waited_for() -> None:
    rig = Rig()
    rig.add("a", [1, 2], max_new_tokens=2)
    rig.add("b", [3, 4], max_new_tokens=2)
    waiting = rig.scheduler._waiting[0]
    waiting.waits.add("grammar")
    for _ in range(4):
        rig.step()
    assert rig.outputs["b"].finish and not rig.outputs["a"].deltas
    waiting.waits.discard("grammar")
    rig.run()
    assert rig.outputs["a"].tokens == solo([1, 2], 2)


# ---- aborts


@at_both_depths
def test_pub_092_an_abort_in_the_queue_ends_at_once_and_disturbs_nobody(depth: int) -> None:
    rig = Rig(depth=depth, max_running=1)
    rig.add("a", prompt(1, 20), max_new_tokens=30)
    rig.step()
    rig.add("b", prompt(2, 20), max_new_tokens=30)
    rig.add("c", prompt(3, 20), max_new_tokens=5)
    rig.step()
    rig.abort("b")
    assert rig.outputs["b"].finish == Finish("abort") and rig.outputs["b"].tokens == []
    rig.abort("b")
    rig.abort("unknown")
    rig.run()
    assert rig.outputs["a"].tokens == solo(prompt(1, 20), 30)
    assert rig.outputs["c"].tokens == solo(prompt(3, 20), 5)
    assert rig.executor.num_computed == 49 + 24, "b was never computed"
    assert rig.scheduler.load().aborted == 1


@at_both_depths
@pytest.mark.parametrize("page_size", [1, 16])
def test_pub_093_aborts_in_the_middle_of_a_prefill_lose_nothing(page_size: int, depth: int) -> None:
    rig = Rig(depth=depth, num_pages=8192 // page_size, page_size=page_size, budget=128, checks=False)
    for number in range(100):
        rig.add(f"{number}", prompt(number % 7, 6000), max_new_tokens=10)
        for _ in range(1 + number % 5):
            rig.step()
        rig.abort(f"{number}")
        rig.scheduler.check()
        load = rig.scheduler.load()
        assert load.free_pages + load.cached_pages == load.total_pages
        assert (load.running, load.waiting, load.leased_pages, load.resident_tokens) == (0, 0, 0, 0)
    assert rig.generate("after", prompt(3, 6000), max_new_tokens=10).tokens == solo(prompt(3, 6000), 10)
    assert (rig.outputs["after"].cached or 0) >= 128


def test_an_abort_between_plan_and_result_is_kept() -> None:
    rig = Rig()
    rig.add("a", prompt(1, 10), max_new_tokens=5)
    rig.add("b", prompt(2, 10), max_new_tokens=5)
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.abort("a")
    rig.executor.submit(plan)
    rig.scheduler.update(rig.executor.collect())
    rig.take(rig.scheduler.drain())
    assert rig.outputs["a"].tokens == []
    rig.run()
    assert rig.outputs["b"].tokens == solo(prompt(2, 10), 5)


# ---- ends


FORCE_2 = {"logit_bias": {2: 100.0}}


@at_both_depths
def test_an_end_id_stops_and_is_in_the_tokens(depth: int) -> None:
    output = Rig(depth=depth, end_ids=(2,)).generate("a", [1], max_new_tokens=5, **FORCE_2)
    assert (output.tokens, output.finish) == ([2], Finish("stop", matched=2))


@pytest.mark.parametrize("end_ids", [(2,), (0, 2)])
def test_pub_047_ignore_eos_covers_every_end_id(end_ids: tuple[int, ...]) -> None:
    output = Rig(end_ids=end_ids).generate("a", [1], max_new_tokens=5, ignore_eos=True, **FORCE_2)
    assert (output.tokens, output.finish) == ([2] * 5, Finish("length"))


@at_both_depths
def test_pub_048_three_ordinary_tokens_come_before_an_end(depth: int) -> None:
    output = Rig(depth=depth, end_ids=(0, 2)).generate(
        "a", [1], min_new_tokens=3, max_new_tokens=10, logit_bias={0: 100.0, 2: 90.0}
    )
    assert len(output.tokens) == 4 and not {0, 2}.intersection(output.tokens[:3])
    assert output.finish == Finish("stop", matched=0)


def test_a_stop_token_id_stops_also_with_ignore_eos() -> None:
    output = Rig(end_ids=(7,)).generate("a", [1], ignore_eos=True, stop_token_ids=(2,), **FORCE_2)
    assert (output.tokens, output.finish) == ([2], Finish("stop", matched=2))


@at_both_depths
def test_no_tokens_asked_for_means_nothing_to_compute(depth: int) -> None:
    rig = Rig(depth=depth)
    output = rig.generate("a", prompt(1, 30), max_new_tokens=0)
    assert (output.tokens, output.finish, output.cached) == ([], Finish("length"), 0)
    assert rig.executor.num_computed == 0


@at_both_depths
def test_the_context_may_be_filled_to_its_end(depth: int) -> None:
    output = Rig(depth=depth, context=20).generate("a", prompt(1, 15), max_new_tokens=5)
    assert (len(output.tokens), output.finish) == (5, Finish("length"))


# ---- logprobs


@at_both_depths
def test_logprobs_come_with_each_token(depth: int) -> None:
    output = Rig(depth=depth).generate("a", [1, 2], max_new_tokens=5, logprobs=2)
    assert len(output.logprobs) == 5
    assert Rig(depth=depth).generate("a", [1, 2], max_new_tokens=5).logprobs == []


@at_both_depths
@pytest.mark.parametrize("budget", [7, 64, 1000])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_pub_049_050_prompt_logprobs_are_whole_whatever_is_cached_or_chunked(
    budget: int, count: int, depth: int
) -> None:
    rig = Rig(depth=depth, budget=budget)
    text = prompt(1, 90)
    rig.generate("longer", [*prompt(1, 60), *prompt(2, 60)], max_new_tokens=1)
    for name in ("a", "b"):
        output = rig.generate(name, text, max_new_tokens=count, prompt_logprobs=1)
        assert output.prompt_logprobs == prompt_logprobs(text)
        assert output.tokens == solo(text, count) and output.cached == 0
    hit = min(89, (90 + max(count, 1) - 1) // 4 * 4)
    assert rig.generate("c", text, max_new_tokens=1).cached == hit, "what was computed for them can be hit"


@at_both_depths
@pytest.mark.parametrize("budget", [7, 64, 1000])
@pytest.mark.parametrize("start", [0, 1, 2, 40, 41, 89, 90])
def test_prompt_logprobs_from_a_start_on_are_complete_and_use_the_cache_before_it(
    start: int, budget: int, depth: int
) -> None:
    rig = Rig(depth=depth, budget=budget)
    text = prompt(1, 90)
    rig.generate("first", text, max_new_tokens=1)
    output = rig.generate("a", text, max_new_tokens=1, prompt_logprobs=1, prompt_logprobs_start=start)
    known = max(1, start)
    assert output.prompt_logprobs == [None] * known + prompt_logprobs(text)[known:]
    assert output.cached == min(known - 1, 88), "whole pages of 4 are kept"


@at_both_depths
def test_prompt_logprobs_survive_a_retraction(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=21, page_size=4, budget=8, lookahead=0)
    rig.add("old", prompt(1, 8), max_new_tokens=70)
    while rig.scheduler.load().resident_tokens < 46:
        rig.step()
    rig.add("young", prompt(2, 36), max_new_tokens=4, prompt_logprobs=0)
    while not rig.scheduler.load().retracted:
        rig.step()
    assert rig.outputs["young"].tokens == [], "in the middle of its prompt"
    rig.run()
    assert rig.outputs["young"].prompt_logprobs == prompt_logprobs(prompt(2, 36))
    assert rig.outputs["young"].tokens == solo(prompt(2, 36), 4)


# ---- refusals


def test_pub_064_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    rig = Rig(num_pages=4000)
    with pytest.raises(ContextLengthError, match=r"context of 8192 tokens.*prompt has 9000 tokens") as caught:
        rig.add("a", prompt(1, 9000), max_new_tokens=1)
    assert (caught.value.status, caught.value.code, caught.value.type) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert rig.generate("b", [1, 2], max_new_tokens=2).tokens == solo([1, 2], 2)
    assert (rig.scheduler.load().refused, rig.scheduler.load().requests) == (1, 1)


def test_pub_065_prompt_and_answer_together_must_fit() -> None:
    rig = Rig(num_pages=4000)
    with pytest.raises(ContextLengthError, match=r"8192.*8000.*500"):
        rig.add("a", prompt(1, 8000), max_new_tokens=500)
    rig.add("b", prompt(1, 8000), max_new_tokens=192)


def test_pub_106_a_full_queue_refuses_and_is_empty_afterwards() -> None:
    rig = Rig(num_pages=1000, max_running=1, max_queued=2)
    refused = 0
    for number in range(20):
        try:
            rig.add(f"{number}", prompt(number, 5), max_new_tokens=50)
        except OverloadedError as error:
            assert error.status == 429
            refused += 1
    assert refused == 17
    rig.run()
    assert all(output.finish == Finish("length") for output in rig.outputs.values()) and len(rig.outputs) == 3
    assert rig.generate("new", [1], max_new_tokens=2).tokens == solo([1], 2)
    assert rig.scheduler.load().waiting == 0


def test_a_queue_of_none_still_takes_what_can_run_at_once() -> None:
    rig = Rig(max_running=2, max_queued=0)
    rig.add("a", [1])
    rig.add("b", [2])
    with pytest.raises(OverloadedError, match="try again later"):
        rig.add("c", [3])


@pytest.mark.parametrize(
    ("tokens", "sampling", "message", "param"),
    [
        ([], {}, "no tokens", "prompt"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE}.*{VOCAB_SIZE} ids", "prompt"),
        ([-1], {}, "token id -1", "prompt"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", "logit_bias"),
        ([1], {"stop_token_ids": (-5,)}, "stop_token_ids", "stop_token_ids"),
        ([1], {"logprobs": VOCAB_SIZE + 1}, "logprobs is", "logprobs"),
        ([1], {"prompt_logprobs": VOCAB_SIZE + 1}, "prompt_logprobs is", "prompt_logprobs"),
    ],
)
def test_what_could_hurt_the_batch_is_refused(
    tokens: list[int], sampling: dict[str, object], message: str, param: str
) -> None:
    rig = Rig()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        rig.add("a", tokens, **sampling)  # type: ignore[arg-type]
    assert caught.value.param == param and not rig.scheduler.has_work


def test_an_id_in_work_is_refused_and_can_be_used_again_later() -> None:
    rig = Rig()
    rig.add("a", [1], max_new_tokens=2)
    with pytest.raises(InvalidRequestError, match="'a' is in work"):
        rig.add("a", [2])
    rig.run()
    assert rig.generate("a", [2], max_new_tokens=2).tokens == solo([2], 2)


# ---- failures


@at_both_depths
def test_a_sequence_that_fails_ends_alone_and_its_pages_are_not_shared(depth: int) -> None:
    rig = Rig(depth=depth, budget=30)
    bad = [*prompt(1, 40), 999]
    rig.executor.bad_tokens = {999}
    rig.add("good", [t for t in prompt(2, 40) if t != 999], max_new_tokens=5)
    rig.add("bad", bad, max_new_tokens=5)
    rig.run()
    finish = rig.outputs["bad"].finish
    assert finish is not None and finish.error is not None
    assert (finish.reason, finish.error.code, finish.error.message) == (
        "error",
        "engine_error",
        "logits are not finite",
    )
    assert len(rig.outputs["good"].tokens) == 5
    rig.executor.bad_tokens = set()
    assert rig.generate("again", bad, max_new_tokens=3).cached == 0


def test_a_step_that_fails_ends_the_sequences_in_it_only() -> None:
    rig = Rig(max_running=1)
    rig.add("a", prompt(1, 10), max_new_tokens=5)
    rig.add("b", prompt(2, 10), max_new_tokens=5)
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.scheduler.fail(EngineError("lost"), plan.step)
    rig.take(rig.scheduler.drain())
    assert rig.outputs["a"].finish is not None and rig.outputs["a"].finish.reason == "error"
    rig.run()
    assert rig.outputs["b"].tokens == solo(prompt(2, 10), 5)


def test_all_can_be_failed() -> None:
    rig = Rig(max_running=1)
    for number in range(3):
        rig.add(f"{number}", [1, 2, number], max_new_tokens=5)
    rig.step()
    rig.scheduler.fail_all(EngineError("lost"))
    rig.take(rig.scheduler.drain())
    assert all(output.finish and output.finish.reason == "error" for output in rig.outputs.values())
    assert rig.scheduler.is_idle and not rig.scheduler.has_work


# ---- what is told


def plan_facts(plan: StepPlan) -> list[tuple[int, int, bool, int]]:
    """Of each sequence: where it starts, how much it computes, whether it draws, how many pages are new."""
    owners = [slot for slot, _, _ in plan.new_pages]
    return [
        (start, length, samples, owners.count(slot))
        for slot, start, length, samples in zip(plan.slots, plan.starts, plan.lengths, plan.samples, strict=True)
    ]


def test_plans_tell_differences() -> None:
    rig = Rig(budget=6, page_size=4)
    rig.add("a", prompt(1, 10), max_new_tokens=4)
    facts = []
    while (plan := rig.step()) is not None:
        facts += plan_facts(plan)
        assert len(plan.admissions) == (plan.step == 1)
    assert facts == [(0, 6, False, 2), (6, 4, True, 1), (10, 1, True, 0), (11, 1, True, 0), (12, 1, True, 1)]
    [admission] = rig.executor.plans[0].admissions
    assert (admission.num_prompt, admission.tokens) == (10, prompt(1, 10))


def test_a_hit_inside_a_page_is_in_the_plan_as_a_copy() -> None:
    rig = Rig(page_size=4)
    rig.generate("a", prompt(1, 16), max_new_tokens=1)
    rig.add("b", [*prompt(1, 10), 1, 2, 3], max_new_tokens=1)
    plan = rig.step()
    assert plan is not None and len(plan.copies) == 1
    assert plan_facts(plan) == [(10, 3, True, 4)]
    assert plan.new_pages[2] == (plan.slots[0], 2, plan.copies[0][1])


def test_the_load_counts_what_there_is() -> None:
    rig = Rig(budget=16, page_size=4, num_pages=64, max_running=2)
    rig.generate("warm", prompt(1, 21), max_new_tokens=1)
    rig.add("a", prompt(2, 40), max_new_tokens=3)
    rig.add("b", [*prompt(1, 20), *prompt(3, 10)], max_new_tokens=3)
    load = rig.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 2, 40 + 10)
    rig.step()
    load = rig.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.resident_tokens) == (1, 1, 24 + 10, 16)
    assert load.free_pages + load.cached_pages + load.leased_pages == load.total_pages == 64
    assert load.leased_pages == 4
    rig.run()
    load = rig.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens, load.generation_tokens) == (21 + 40 + 30, 20, 1 + 3 + 3)
    assert (load.requests, load.running, load.waiting, load.waiting_tokens) == (3, 0, 0, 0)
    assert load.steps == len(rig.executor.plans)


def test_siblings_that_wait_for_a_prefix_count_only_what_they_will_compute() -> None:
    rig = Rig(budget=16, page_size=4)
    rig.add("a", prompt(1, 41), max_new_tokens=1)
    rig.step()
    for name in ("b", "c"):
        rig.add(name, prompt(1, 41), max_new_tokens=1)
    assert rig.scheduler.load().waiting_tokens == (41 - 16) + 2 * 1


def test_speeds_are_measured_with_the_clock_that_was_handed_in() -> None:
    rig = Rig(budget=32)
    rig.add("a", prompt(1, 32), max_new_tokens=3)
    for seconds in (0.5, 0.1, 0.1):
        plan = rig.scheduler.schedule()
        assert plan is not None
        rig.executor.submit(plan)
        rig.now += seconds
        rig.scheduler.update(rig.executor.collect())
        rig.take(rig.scheduler.drain())
    load = rig.scheduler.load()
    assert (load.prefill_tokens_per_s, load.decode_step_s, load.last_step_s) == pytest.approx((64, 0.1, 0.1))


def test_nothing_to_do_gives_no_plan() -> None:
    rig = Rig()
    assert rig.scheduler.schedule() is None and not rig.scheduler.has_work and rig.scheduler.is_idle
    assert rig.outputs == {} and Output().finish is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "logit_bias"),
        ({"stop_token_ids": tuple(range(129))}, "stop_token_ids"),
    ],
)
def test_more_than_a_slot_has_room_for_is_refused(changes: dict[str, object], param: str) -> None:
    rig = Rig()
    with pytest.raises(InvalidRequestError, match="at most") as error:
        rig.add("greedy for ids", prompt(1, 4), **changes)
    assert error.value.param == param


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_program_has_computed_outlives_the_work_of_others_until_it_ends(depth: int) -> None:
    def cached_after_others(ends: bool) -> int:
        rig = Rig(num_pages=64, depth=depth)
        rig.generate("first", prompt(1, 80), program="p", max_new_tokens=1)
        if ends:
            rig.scheduler.end_programs(["p", "unknown"])
        for seed in range(2, 8):
            rig.generate(f"{seed}", prompt(seed, 60), max_new_tokens=1)
        return rig.generate("again", prompt(1, 81), program="p", max_new_tokens=1).cached

    assert cached_after_others(ends=False) == 80
    assert cached_after_others(ends=True) == 0


def test_a_program_that_is_silent_for_long_holds_nothing() -> None:
    rig = Rig(num_pages=64)
    rig.generate("first", prompt(1, 80), program="p", max_new_tokens=1)
    assert rig.cache.num_held == 20
    rig.now += PROGRAM_SILENCE_S + 1
    rig.generate("other", prompt(2, 20), max_new_tokens=1)
    assert rig.cache.num_held == 0


def test_an_aborted_request_leaves_nothing_held_for_its_program() -> None:
    rig = Rig(num_pages=64)
    rig.add("a", prompt(1, 80), program="p", max_new_tokens=100)
    for _ in range(4):
        rig.step()
    rig.scheduler.end_programs(["p"])
    rig.abort("a")
    rig.run()
    assert rig.cache.num_held == 0


def test_programs_never_keep_memory_from_others() -> None:
    rig = Rig(num_pages=32)
    for seed in range(1, 5):
        rig.generate(f"{seed}", prompt(seed, 30), program=f"p{seed}", max_new_tokens=1)
    assert rig.generate("large", prompt(9, 120), max_new_tokens=6).tokens == solo(prompt(9, 120), 6)


# ---- trails

TRACED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def marks_of(trail: Trail) -> list[tuple[str, int, int, int]]:
    return [(mark.name, mark.step, mark.num_tokens, mark.num_cached) for mark in trail.marks]


@at_both_depths
def test_a_traced_request_leaves_a_trail_of_its_steps_and_others_leave_none(depth: int) -> None:
    rig = Rig(depth=depth, budget=16)
    rig.add("plain", prompt(1, 8), max_new_tokens=2)
    rig.run()
    assert rig.scheduler.drain_trails() == []
    steps = rig.scheduler.load().steps
    rig.add("traced", prompt(1, 40), max_new_tokens=3, trace_headers=TRACED)
    rig.run()
    (trail,) = rig.scheduler.drain_trails()
    assert (trail.request.id, trail.finish) == ("traced", Finish("length"))
    assert marks_of(trail) == [
        ("queued", 0, 40, 0),
        ("scheduled", steps + 1, 40, 8),
        ("first_token", steps + 2, 40, 8),  # 32 tokens in steps of 16
        ("finished", steps + 4, 43, 8),
    ]
    times = [mark.at_s for mark in trail.marks]
    assert times == sorted(times) and len(set(times)) == 4
    assert rig.scheduler.drain_trails() == []


@at_both_depths
def test_a_trail_tells_of_retractions(depth: int) -> None:
    rig = Rig(depth=depth, num_pages=40, page_size=4, budget=256, max_running=2, lookahead=0)
    rig.add("old", prompt(1, 60), max_new_tokens=90)
    rig.add("young", prompt(2, 60), max_new_tokens=40, trace_headers=TRACED)
    rig.run()
    (trail,) = rig.scheduler.drain_trails()
    names = [mark.name for mark in trail.marks]
    num_retracted = rig.scheduler.load().retracted
    assert num_retracted > 0
    assert names == ["queued", "scheduled", "first_token", *["retracted", "scheduled"] * num_retracted, "finished"]
    assert [mark.num_tokens for mark in trail.marks][-1] == 100
    again = trail.marks[names.index("retracted") + 1]
    assert again.num_tokens > 60 and again.num_cached > 0


@pytest.mark.parametrize("end", ["abort", "refuse", "fail"])
def test_a_trail_ends_however_the_request_does(end: str) -> None:
    rig = Rig()
    rig.add("a", prompt(1, 20), max_new_tokens=5, trace_headers=TRACED)
    if end == "abort":
        rig.abort("a")
    elif end == "refuse":
        rig.scheduler.refuse("a", EngineError("no"))
    else:
        rig.step()
        rig.scheduler.fail_all(EngineError("broken"))
    (trail,) = rig.scheduler.drain_trails()
    assert trail.finish.reason == ("abort" if end == "abort" else "error")
    has_begun = end == "fail"
    assert [mark.name for mark in trail.marks] == [
        "queued",
        *(["scheduled", "first_token"] if has_begun else []),
        "finished",
    ]
    assert trail.marks[-1].step == (1 if has_begun else 0)
