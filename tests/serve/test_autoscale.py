"""How many replicas there should be: the rules one by one, and a day's load under Serve's own delays."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingPolicy

from sgray.serve.autoscale import (
    MEMORY_SHARE,
    ONGOING,
    PREFILL_SHARE,
    SEAT_SHARE,
    WAIT_S,
    EngineSignals,
    replicas_for_ongoing_requests,
    replicas_for_work,
)
from sgray.serve.build import build

IDLE = {ONGOING: 0.0, WAIT_S: 0.0, PREFILL_SHARE: 0.0, MEMORY_SHARE: 0.0, SEAT_SHARE: 0.0}


def context(
    replicas: list[dict[str, float]],
    *,
    wanted: int | None = None,
    running: int | None = None,
    queued: float = 0,
    **more: Any,
) -> Any:
    """What Serve tells a policy; each replica's signals, and `running` where some have not reported."""
    names = {name for one in replicas for name in one}
    running = len(replicas) if running is None else running
    values = {
        "aggregated_metrics": {name: {i: one[name] for i, one in enumerate(replicas)} for name in names},
        "total_queued_requests": queued,
        "total_num_requests": queued,
        "current_num_replicas": running,
        "target_num_replicas": running if wanted is None else wanted,
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 100,
        "policy_state": {},
        "config": SimpleNamespace(target_ongoing_requests=32.0),
    }
    return SimpleNamespace(**(values | more))


def wanted_by(policy: EngineSignals, *replicas: dict[str, float], **more: Any) -> int:
    number, state = policy(context([IDLE | one for one in replicas], **more))
    assert state == {}
    return number


@pytest.mark.parametrize(
    "signals",
    [{WAIT_S: 2.1}, {PREFILL_SHARE: 0.85}, {MEMORY_SHARE: 0.85}, {SEAT_SHARE: 0.9}],
    ids=lambda signals: next(iter(signals)),
)
def test_each_signal_alone_starts_another_replica(signals: dict[str, float]) -> None:
    assert wanted_by(EngineSignals(2.0), signals | {ONGOING: 1.0}) == 2


def test_a_replica_that_is_busy_within_its_means_stays_alone() -> None:
    busy = {ONGOING: 40.0, WAIT_S: 1.5, PREFILL_SHARE: 0.7, MEMORY_SHARE: 0.7, SEAT_SHARE: 0.7}
    assert wanted_by(EngineSignals(2.0), busy) == 1


def test_a_tighter_target_wants_more_replicas() -> None:
    replicas = [{ONGOING: 8.0, WAIT_S: 3.0}] * 4
    assert wanted_by(EngineSignals(4.0), *replicas) == 4
    assert wanted_by(EngineSignals(2.0), *replicas) == 6
    assert wanted_by(EngineSignals(0.1), *replicas) == 6, "no more than half of what runs is added"


def test_a_number_of_requests_may_be_set_as_well() -> None:
    replicas = [{ONGOING: 8.0, PREFILL_SHARE: 0.7}] * 2
    assert wanted_by(EngineSignals(2.0), *replicas) == 2
    assert wanted_by(EngineSignals(2.0, target_ongoing_requests=5.0), *replicas) == 3


def test_one_hot_replica_among_idle_ones_is_the_routers_business() -> None:
    assert wanted_by(EngineSignals(2.0), {ONGOING: 9.0, WAIT_S: 7.0}, {}, {}, {}, wanted=4) <= 4


def test_a_backlog_that_grows_while_replicas_start_asks_for_no_more_of_them() -> None:
    policy = EngineSignals(2.0)
    for backlog_s in (10.0, 100.0, 1000.0):
        assert wanted_by(policy, {ONGOING: 50.0, WAIT_S: backlog_s}, wanted=2) == 2


def test_nothing_goes_while_others_start_or_have_not_reported() -> None:
    policy = EngineSignals(2.0)
    assert wanted_by(policy, {}, {}, wanted=4) == 4
    assert wanted_by(policy, {}, {}, running=4, wanted=4) == 4
    assert wanted_by(policy, {}, {}, {}, {}) == 2


@pytest.mark.parametrize(("busy", "number"), [(0.8, 4), (0.6, 4), (0.5, 3), (0.3, 2), (0.0, 2)])
def test_a_replica_goes_only_where_the_others_have_room_to_spare(busy: float, number: int) -> None:
    assert wanted_by(EngineSignals(2.0), *[{ONGOING: 1.0, PREFILL_SHARE: busy * 0.8}] * 4) == number


def test_the_last_replica_stays_while_it_has_a_request_and_goes_when_idle() -> None:
    assert wanted_by(EngineSignals(2.0), {ONGOING: 0.2}) == 1
    assert wanted_by(EngineSignals(2.0), {}) == 0
    assert wanted_by(EngineSignals(2.0), {PREFILL_SHARE: 1e-3}) == 0, "an average of what came before is no request"


def test_a_held_call_wants_the_first_replica_and_keeps_it_while_it_starts() -> None:
    policy = EngineSignals(2.0)
    assert wanted_by(policy, running=0) == 0
    assert wanted_by(policy, running=0, queued=3) == 1
    assert wanted_by(policy, running=0, wanted=1) == 1, "one that starts is not given up"


def test_the_bounds_hold() -> None:
    policy = EngineSignals(2.0)
    bounds = {"capacity_adjusted_min_replicas": 2, "capacity_adjusted_max_replicas": 3}
    assert wanted_by(policy, {}, {}, **bounds) == 2
    assert wanted_by(policy, {ONGOING: 1.0, WAIT_S: 99.0}, {ONGOING: 1.0, WAIT_S: 99.0}, **bounds) == 3


@given(work=st.floats(0, 1000), least=st.integers(0, 1), wanted=st.integers(0, 100), running=st.integers(0, 100))
def test_a_step_settles_and_never_turns_back(work: float, least: int, wanted: int, running: int) -> None:
    steps = [wanted]
    for _ in range(20):
        steps.append(replicas_for_work(work, least, running=max(running, steps[-1]), wanted=steps[-1], may_shrink=True))
    assert steps in (sorted(steps), sorted(steps, reverse=True)), "one direction only"
    assert steps[-1] == steps[-2]
    assert steps[-1] >= max(least, min(work, wanted)), "what is left is enough"


@pytest.mark.parametrize(
    ("ongoing", "queued", "wanted"),
    [
        ([], 0, 0),
        ([], 3, 1),
        ([0.0], 0, 0),
        ([1.0], 0, 1),
        ([32.0], 0, 1),
        ([33.0], 0, 2),
        ([40.0, 60.0], 0, 4),
        ([1e6], 0, 4),
    ],
)
def test_the_number_of_replicas_may_follow_the_requests_alone(ongoing: list[float], queued: int, wanted: int) -> None:
    told = context([{ONGOING: count} for count in ongoing], queued=queued, capacity_adjusted_max_replicas=4)
    assert replicas_for_ongoing_requests(told) == (wanted, {})


def policy_of(**values: Any) -> AutoscalingPolicy:
    """What Serve is told about the policy for these values of the `serve` section."""
    replicas = build({"serve": values})._bound_deployment.init_args[1]
    scaling = replicas._bound_deployment._deployment_config.autoscaling_config
    policy: AutoscalingPolicy = scaling.policy
    return policy


def test_the_engine_decides_unless_requests_are_asked_to() -> None:
    policy = policy_of(target_ttft_s=0.5)
    assert policy.policy_function == "sgray.serve.autoscale.EngineSignals"
    assert policy.policy_kwargs == {"target_ttft_s": 0.5, "target_ongoing_requests": None}
    assert policy_of(autoscaling_policy="requests").policy_function.endswith(".replicas_for_ongoing_requests")


@pytest.mark.parametrize("name", ["engine", "requests"])
def test_a_policy_works_in_a_controller_where_nothing_of_ours_is_installed(name: str) -> None:
    code = (
        "import pickle, sys\n"
        "sys.modules['sgray'] = None\n"
        "policy = pickle.loads(sys.stdin.buffer.read())\n"
        "print(policy.__name__, sorted(name for name in sys.modules if name.startswith('sgray.')))\n"
    )
    raw = policy_of(autoscaling_policy=name).get_serialized_policy_def()
    assert raw is not None
    done = subprocess.run([sys.executable, "-c", code], input=raw, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().split(maxsplit=1)[1].strip() == "[]"


@dataclass
class Cluster:
    """Replicas as fluids: each computes `SPEED` prompt tokens a second and then decodes for `DECODE_S`.

    Serve's own wrapper of the policy lays the delays over it. A new replica takes `START_S`. Signals are means over the
    last five seconds, as the service asks for.
    """

    SPEED = 4000.0
    PROMPT = 1000.0
    DECODE_S = 10.0
    SEATS = 128
    START_S = 45.0

    now: float = 0.0
    target: int = 1
    ready: list[float] = field(default_factory=lambda: [0.0])  # when each replica is up
    backlog: list[float] = field(default_factory=lambda: [0.0])  # prompt tokens
    history: list[list[dict[str, float]]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def tick(self, policy: Any, load: float) -> None:
        """A second in which `load` replicas' worth of prompts comes in."""
        running = [index for index, at in enumerate(self.ready) if at <= self.now]
        seen = [self._compute(index, load * self.SPEED / len(running)) for index in running]
        self.waits.append(max((one[WAIT_S] for one in seen), default=0.0))
        self.history = [*self.history[-4:], seen]
        means = [
            {name: sum(then[i][name] for then in self.history if i < len(then)) / 5 for name in IDLE}
            for i in range(len(running))
        ]
        config = SimpleNamespace(
            upscale_delay_s=10.0,
            downscale_delay_s=300.0,
            downscale_to_zero_delay_s=None,
            get_upscaling_factor=lambda: 1.0,
            get_downscaling_factor=lambda: 1.0,
        )
        told = context(means, wanted=self.target, policy_state=self.state, config=config)
        told.capacity_adjusted_min_replicas = 1
        self.target, self.state = policy(told)
        self.targets.append(self.target)
        self.ready = self.ready[: self.target] + [self.now + self.START_S] * (self.target - len(self.ready))
        self.backlog = self.backlog[: self.target] + [0.0] * (self.target - len(self.backlog))
        self.now += 1.0

    def _compute(self, index: int, arriving: float) -> dict[str, float]:
        self.backlog[index] = max(0.0, self.backlog[index] + arriving - self.SPEED)
        wait_s = self.backlog[index] / self.SPEED
        decoding = min(arriving, self.SPEED) / self.PROMPT * self.DECODE_S
        ongoing = decoding + self.backlog[index] / self.PROMPT
        return {
            ONGOING: ongoing,
            WAIT_S: wait_s,
            PREFILL_SHARE: min(1.0, arriving / self.SPEED),
            MEMORY_SHARE: decoding / self.SEATS,
            SEAT_SHARE: ongoing / self.SEATS,
        }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """With Serve's delays measured on the cluster's own clock."""
    cluster = Cluster()
    monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda: cluster.now))
    return cluster


def turns(targets: list[int]) -> int:
    """How often the number of replicas changes its direction."""
    steps = [b - a for a, b in pairwise(targets) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


@pytest.mark.parametrize("peak", [0.5, 1.0, 2.0, 3.3, 6.0])
def test_a_day_of_load_goes_up_once_and_down_once(cluster: Cluster, peak: float) -> None:
    policy, draw = autoscaling_policy._apply_autoscaling_config(EngineSignals(2.0)), random.Random(1)
    for second in range(4 * 3600):
        shape = max(0.0, math.sin(math.pi * second / (3 * 3600)))  # three hours of day, one of night
        cluster.tick(policy, peak * shape * draw.uniform(0.7, 1.3))
    most = max(cluster.targets)
    assert peak <= most <= math.ceil(peak / 0.7) + 1
    assert turns(cluster.targets) <= 1
    assert cluster.targets[-1] == 1
    waits = sorted(cluster.waits)
    assert waits[int(len(waits) * 0.97)] <= 2.0, "new replicas came in time for nearly everybody"


def test_a_steady_load_with_bursts_keeps_its_number(cluster: Cluster) -> None:
    policy, draw = autoscaling_policy._apply_autoscaling_config(EngineSignals(2.0)), random.Random(2)
    for second in range(3600):
        burst = 3.0 if second % 97 < 3 else 0.0
        cluster.tick(policy, 2.5 * draw.uniform(0.6, 1.4) + burst)
    assert len(set(cluster.targets[900:])) == 1
    assert turns(cluster.targets) == 0


def test_a_jump_of_the_load_is_met_within_a_few_starts(cluster: Cluster) -> None:
    policy = autoscaling_policy._apply_autoscaling_config(EngineSignals(2.0))
    for _ in range(60):
        cluster.tick(policy, 0.3)
    for _ in range(240):
        cluster.tick(policy, 6.0)
    assert cluster.targets[59] == 1
    assert cluster.targets[80] == 2, "the first is there after its delay"
    assert 6 < cluster.targets[-1] <= 16
