"""What routing policies are compared on with real replicas, and how their figures become ratios."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from benchmark_modules import loaded

from sgray.bench.route.arrivals import BLOCK
from sgray.bench.route.workloads import agentic


@pytest.fixture(scope="module")
def route_pairs() -> Iterator[ModuleType]:
    with loaded("route_pairs") as module:
        yield module


def test_the_turns_of_a_session_say_in_parts_what_the_simulated_ones_say_whole(route_pairs: ModuleType) -> None:
    for first in agentic(random.Random(3), 1.0, 20):
        said: tuple[int, ...] = ()
        for turn, new_blocks in route_pairs.turns(first):
            assert new_blocks
            said += new_blocks
            assert said == turn.blocks
        assert turn.then is None


def test_a_block_is_the_same_in_every_policys_turn_and_another_in_another_round(route_pairs: ModuleType) -> None:
    tokens = route_pairs.block_tokens(1, 7)
    assert len(tokens) == BLOCK // route_pairs.GRAIN
    assert tokens == route_pairs.block_tokens(1, 7)
    assert tokens != route_pairs.block_tokens(2, 7) and tokens != route_pairs.block_tokens(1, 8)


def test_figures_count_what_was_cached_of_all_prompts_and_what_failed(route_pairs: ModuleType) -> None:
    answers = [route_pairs.Answer(100, 90, [1] * 10, 0.5), route_pairs.Answer(300, 10, [1] * 20, 1.5)]
    found = route_pairs.figures(route_pairs.Tally(answers, ["CallError: 503"]), 10.0)
    assert found["hit_share"] == 0.25 and found["tokens_per_s"] == 3.0
    assert found["ttft_s_mean"] == 1.0 and found["ttft_s_p99"] == 1.5
    assert (found["requests"], found["errors"]) == (2, 1)


def test_a_ratio_is_the_median_of_pairs_and_not_the_pair_of_medians(route_pairs: ModuleType) -> None:
    ours, others = [1.0, 10.0, 3.0], [2.0, 5.0, 9.0]
    rounds = [
        {policy: dict.fromkeys(route_pairs.COMPARED, value) for policy, value in (("cost", one), ("turns", other))}
        for one, other in zip(ours, others, strict=True)
    ]
    assert route_pairs.ratios(rounds, "cost")["turns"]["ttft_s_p50"] == 0.5  # of 0.5, 2 and a third


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "cost,warmest"], "unknown policy 'warmest'"),
        (["--policies", "cost"], "needs at least two names"),
        (["--policies", "cost,cost"], "each once"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--memory-tokens", "100"], "--memory-tokens must be at least 4096"),
        (["--seconds", "0"], "--seconds must be above 0"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(
    route_pairs: ModuleType,
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["route_pairs.py", *flags])
    with pytest.raises(SystemExit) as ended:
        route_pairs.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
