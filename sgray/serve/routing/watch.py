"""Who may be chosen: nobody that fell silent, and not too often those that have just come. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgray.serve.routing.replica import ReplicaState


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """A replica is silent if it owes an answer and said nothing for `silent_s`, or `silent_steps` of its last step.

    For `young_s` after it joined, while older ones are there, a replica gets at most `young_share` times the mean share
    of prompt tokens, unless the older ones are all busy for `busy_s`.
    """

    silent_s: float = 5.0
    silent_steps: float = 10.0
    young_s: float = 30.0
    young_share: float = 2.0
    busy_s: float = 2.0


class Watch:
    """Sorts candidates out; never all of them."""

    def __init__(self, limits: WatchLimits) -> None:
        self.limits = limits

    def eligible(self, replicas: Iterable[ReplicaState], now: float, tokens_per_s: float) -> list[ReplicaState]:
        """Those of `replicas` that should be chosen among."""
        everyone = list(replicas)
        speaking = [one for one in everyone if not self.is_silent(one, now)] or everyone
        young = [one for one in speaking if one.is_young and now - one.joined < self.limits.young_s]
        if not young:
            return speaking
        return self._without_sated(speaking, young, tokens_per_s)

    def is_silent(self, replica: ReplicaState, now: float) -> bool:
        """Whether it owes an answer for too long."""
        if not replica.tickets:
            return False
        limits = self.limits
        since = max(replica.heard, replica.owes_since)
        return now - since > max(limits.silent_s, limits.silent_steps * replica.load.last_step_s)

    def _without_sated(
        self, speaking: list[ReplicaState], young: list[ReplicaState], tokens_per_s: float
    ) -> list[ReplicaState]:
        old = [one for one in speaking if one not in young]
        if not old or all(one.load.waiting_tokens > self.limits.busy_s * tokens_per_s for one in old):
            return speaking
        mean = sum(one.recent for one in speaking) / len(speaking)
        return [one for one in speaking if one not in young or one.recent <= self.limits.young_share * mean]
