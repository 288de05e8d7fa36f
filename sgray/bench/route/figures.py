"""From the outcomes of a simulation to its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgray.bench.report import percentile
from sgray.bench.route.simulation import Outcome, Simulation


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good if its first token came within `ttft_s` and the others every `tpot_s` seconds on average."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05

    def is_met(self, outcome: Outcome) -> bool:
        """Whether this request was served well; one that was lost was not."""
        ttft_s = outcome.ttft_s
        return not outcome.is_lost and ttft_s is not None and ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s


def figures_of(simulation: Simulation, objective: Objective, bound: float) -> dict[str, Any]:
    """`goodput` is the share of good requests; times in seconds unless the name says otherwise."""
    outcomes = simulation.outcomes
    ttfts = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    tpots = [one.tpot_s for one in outcomes if one.tpot_s]
    good = sum(objective.is_met(one) for one in outcomes)
    prompt = sum(one.arrival.num_tokens for one in outcomes)
    hit = sum(min(one.cached, one.arrival.num_tokens) for one in outcomes) / max(1, prompt)
    computed = simulation.computed
    counters = [router.counters for router in simulation.routers]
    began = min((one.came for one in outcomes), default=0.0)
    span = max(1e-9, max((one.finished or one.came for one in outcomes), default=0.0) - began)
    return {
        "goodput": good / max(1, len(outcomes)),
        "goodput_per_s": good / span,
        "requests": len(outcomes),
        "lost": sum(one.is_lost for one in outcomes),
        **_spread("ttft", ttfts),
        **_spread("tpot", tpots),
        "hit_rate": hit,
        "hit_rate_bound": bound,
        "imbalance": max(computed) * len(computed) / max(1, sum(computed)),
        "missed_share": sum(one.missed for one in counters) / max(1, sum(one.prompt_tokens for one in counters)),
        "decision_us_mean": 1e6 * sum(simulation.decisions_s) / max(1, len(simulation.decisions_s)),
        "decision_us_p99": 1e6 * percentile(simulation.decisions_s, 99),
        "simulated_s": span,
    }


def _spread(name: str, values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else 0.0
    return {f"{name}_mean_s": mean, **{f"{name}_p{rank}_s": percentile(values, rank) for rank in (50, 90, 99)}}
