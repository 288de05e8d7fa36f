"""The simulation of routing: the loader, the workloads, the bound, the replicas, and what policies do in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sgray.bench.route.arrivals import BLOCK, Arrival, every, load_trace, pooled_hit_rate
from sgray.bench.route.figures import Objective, figures_of
from sgray.bench.route.light import LightReplica
from sgray.bench.route.replica import EngineReplica
from sgray.bench.route.simulation import Outcome, Simulation, World
from sgray.bench.route.timing import Size, Timing
from sgray.bench.route.workloads import workloads
from sgray.cli import main
from sgray.errors import ConfigError
from sgray.protocol import Request, SamplingParams, namespace_key, page_hashes

TRACE = Path(__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
SMALL = Size(memory_tokens=40 * BLOCK)


def small(name: str, rate: float = 8.0, seconds: float = 4.0, seed: int = 0) -> list[Arrival]:
    return workloads()[name][0](random.Random(seed), rate, seconds)


def play(arrivals: list[Arrival], **options: object) -> Simulation:
    simulation = Simulation(World(**{"num_replicas": 4, **options}))  # type: ignore[arg-type]
    simulation.run(arrivals)
    for router in simulation.routers:
        router.check()
    return simulation


def test_the_loader_reads_times_lengths_and_blocks() -> None:
    arrivals = load_trace(TRACE)
    assert len(arrivals) == 60
    assert (arrivals[0].time, arrivals[0].num_tokens, arrivals[0].num_output) == (0.0, 6758, 500)
    assert arrivals[0].blocks == tuple(range(14))
    twice = load_trace(TRACE, speed=2.0, limit=50)
    assert [one.time * 2 for one in twice] == [one.time for one in arrivals[:50]]
    spread = load_trace(TRACE, jitter_s=3.0, seed=4)
    assert len({one.time for one in spread}) == 60 > len({one.time for one in arrivals})
    assert [one.time for one in spread] == sorted(one.time for one in spread)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no requests"),
        ("{}", r"line 1: not a request of a trace \(KeyError"),
        ("[1]", r"line 1: not a request of a trace \(TypeError"),
        ("hello", "line 1: not a request of a trace"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "600 tokens are not 1 blocks"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "0 tokens"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_trace(path)


def test_a_trace_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(Path("nowhere.jsonl"))


@pytest.mark.parametrize("grain", [1, 16, 64])
def test_a_prompt_shares_pages_as_its_blocks_do(grain: int) -> None:
    one, other = Arrival(0, 1600, 1, (1, 2, 3, 4)), Arrival(0, 1100, 1, (1, 2, 9))
    page = BLOCK // grain
    first, second = (page_hashes(item.prompt(grain), page, namespace_key()) for item in (one, other))
    assert (len(first), len(second)) == (3, 2)
    assert first[:2] == second[:2]
    assert len(one.prompt(grain)) == -(-1600 // grain)


@pytest.mark.parametrize("name", workloads())
def test_workloads_are_fixed_by_their_seed_and_make_sound_requests(name: str) -> None:
    one, again, other = (every(small(name, seed=seed)) for seed in (1, 1, 2))
    parts = [[(each.time, each.num_tokens, each.blocks) for each in part] for part in (one, again, other)]
    assert parts[0] == parts[1] != parts[2]
    for each in one:
        assert len(each.blocks) == -(-each.num_tokens // BLOCK) and each.num_output >= 1


def test_the_pooled_bound_counts_what_one_large_cache_would_hit() -> None:
    arrivals = [Arrival(time, 2 * BLOCK, 1, blocks) for time, blocks in enumerate([(1, 2), (3, 4), (1, 2), (1, 5)])]
    hits = (2 * BLOCK - 1) + BLOCK
    assert pooled_hit_rate(arrivals, 100) == hits / (8 * BLOCK)
    assert pooled_hit_rate(arrivals, 2) == BLOCK / (8 * BLOCK)
    assert pooled_hit_rate(small("zero_reuse"), 10**6) == 0.0


def test_the_timing_meets_the_measured_results_it_was_fitted_to() -> None:
    results = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200_offline.json").read_text())["workloads"]
    timing = Timing()
    prefill = 48 * timing.prefill_s(0, 8192)
    assert prefill == pytest.approx(results["prefill_48x8192_osl1"]["s"], rel=0.07)
    for name, count, prompt, output in (("bs16_isl1024_osl257", 16, 1024, 257), ("bs64_isl1024_osl257", 64, 1024, 257)):
        decode = (output - 1) * timing.decode_s(count, count * (prompt + output / 2))
        whole = count * timing.prefill_s(0, prompt) + decode
        assert whole == pytest.approx(results[name]["s"], rel=0.07)


@pytest.mark.parametrize("make", [EngineReplica, LightReplica])
def test_a_replica_answers_all_tells_its_cache_and_stays_within_its_memory(make: Callable[..., EngineReplica]) -> None:
    now = 0.0
    replica = make(Timing(), SMALL, lambda: now)
    stored: set[int] = set()
    finished: list[str] = []
    page = BLOCK // SMALL.grain
    for number in range(30):
        tokens = Arrival(0, 3000, 50, tuple(range(number % 12 * 6, number % 12 * 6 + 6))).prompt(SMALL.grain)
        replica.submit(Request(str(number), tokens, SamplingParams(max_new_tokens=4, ignore_eos=True)))
    while (seconds := replica.begin()) is not None:
        assert seconds > 0
        now += seconds
        report = replica.end()
        for event in report.events:
            (stored.update if event.kind == "stored" else stored.difference_update)(event.hashes)
        finished += [delta.id for delta in report.deltas if delta.finish is not None]
        assert set(replica.snapshot()) == stored
        assert len(stored) <= 40
    assert sorted(finished, key=int) == [str(number) for number in range(30)]
    assert 0 < replica.computed <= 30 * -(-3000 // SMALL.grain)
    assert page == 32


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_load", "consistent_hash", "sglang", "ray_prefix"])
def test_every_request_ends_under_every_policy_and_the_pictures_agree(policy: str) -> None:
    simulation = play(load_trace(TRACE), policy=policy, num_ingresses=2)
    assert len(simulation.outcomes) == 60
    assert all(one.finished is not None and one.first is not None for one in simulation.outcomes)
    for seat in simulation._seats:
        seat.replica.check()  # type: ignore[attr-defined]
    figures = figures_of(simulation, Objective(), 0.5)
    assert figures["goodput"] > 0.5 and figures["missed_share"] < 0.02


def test_a_seed_fixes_a_simulation() -> None:
    runs = [
        [(one.first, one.finished, one.cached) for one in play(small("agentic", 2.0), seed=seed).outcomes]
        for seed in (3, 3)
    ]
    assert runs[0] == runs[1]


def test_the_light_replica_ranks_policies_as_the_engine_does() -> None:
    hits = {}
    for make in (EngineReplica, LightReplica):
        for policy in ("cost", "round_robin"):
            simulation = play(small("grouped", 20.0, 8.0), policy=policy, make_replica=make)
            hits[make, policy] = figures_of(simulation, Objective(), 0.0)["hit_rate"]
        assert hits[make, "cost"] > hits[make, "round_robin"] + 0.1
    assert hits[EngineReplica, "cost"] == pytest.approx(hits[LightReplica, "cost"], abs=0.05)


def test_hundreds_of_light_replicas_can_be_simulated() -> None:
    simulation = play(small("zero_reuse", 200.0, 1.0), num_replicas=400, make_replica=LightReplica)
    assert all(one.finished is not None for one in simulation.outcomes)
    assert max(simulation.computed) < 40_000, "nobody is given much more than one prompt"


def test_lost_reports_are_made_good_by_a_snapshot() -> None:
    simulation = play(small("grouped", 20.0, 6.0), loss=0.2, num_ingresses=2)
    assert all(one.finished is not None for one in simulation.outcomes)
    assert figures_of(simulation, Objective(), 0.0)["hit_rate"] > 0.2
    stored = {seat.name: set(seat.replica.snapshot()) for seat in simulation._seats}
    sequences = {seat.name: seat.sequence for seat in simulation._seats}
    for ingress in simulation._ingresses:
        in_step = [name for name in stored if ingress.known.get(name) == sequences[name]]
        assert all(ingress.router._replicas[name].stored == stored[name] for name in in_step)


def test_replicas_that_die_lose_what_has_begun_and_nothing_else() -> None:
    simulation = play(small("grouped", 20.0, 12.0), churn_s=2.5, num_ingresses=2)
    lost = [one for one in simulation.outcomes if one.is_lost]
    assert lost and all(one.first is not None for one in lost)
    assert all(one.finished is not None for one in simulation.outcomes if not one.is_lost)
    assert len(simulation._gone) >= 4


def siblings_hit(num_ingresses: int) -> float:
    simulation = play(small("bursts", 1.0, 20.0), num_ingresses=num_ingresses)
    return float(figures_of(simulation, Objective(), 0.0)["hit_rate"])


def test_siblings_of_a_burst_meet_over_four_ingresses_nearly_as_over_one() -> None:
    assert siblings_hit(4) > 0.85 * siblings_hit(1)


def test_the_objective_asks_for_both_and_never_counts_what_was_lost() -> None:
    arrival = Arrival(0.0, 10, 11, (1,))
    objective = Objective(ttft_s=1.0, tpot_s=0.1)
    assert objective.is_met(Outcome(arrival, 5.0, first=6.0, finished=7.0))
    assert not objective.is_met(Outcome(arrival, 5.0, first=6.1, finished=7.0))
    assert not objective.is_met(Outcome(arrival, 5.0, first=6.0, finished=7.1))
    assert not objective.is_met(Outcome(arrival, 5.0, first=6.0, finished=7.0, is_lost=True))
    assert not objective.is_met(Outcome(arrival, 5.0))


def test_the_command_prints_a_table_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--speed=2", "--replicas=3", "--ingresses=2", "--policies=cost,round_robin", f"--json={figures}"]
    assert main(["bench", "route", f"--trace={TRACE}", *flags]) == 0
    printed = capsys.readouterr().out
    measured = json.loads(figures.read_text())
    assert list(measured) == ["cost", "round_robin"]
    for policy, one in measured.items():
        assert policy in printed
        assert {"goodput", "ttft_mean_s", "ttft_p99_s", "tpot_p99_s", "hit_rate", "imbalance"} <= one.keys()
        assert one["requests"] == 60
        assert one["hit_rate"] <= one["hit_rate_bound"] + 0.01
    assert "TTFT <= 2 s and TPOT <= 0.05 s" in printed


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--policies=cost,best", "unknown policy 'best'"),
        ("--policies=,", "no policy is named"),
        ("--replicas=0", "--replicas must be at least 1"),
        ("--grain=3", "--grain must be a power of two"),
        ("--mixed-prefill-size=8192", "lower --grain"),
        ("--loss=1", "--loss must be"),
        ("--speed=0", "--speed must be above 0"),
        ("--churn=-1", "--churn must be above 0"),
        ("--seconds=0.0001", "no request comes"),
    ],
)
def test_wrong_flags_are_explained(flag: str, reason: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "route", "--workload=bursts", flag]) == 1
    assert reason in capsys.readouterr().err
