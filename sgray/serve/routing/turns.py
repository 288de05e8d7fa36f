"""The policies that look at no cache: by turns, and to the replica with the least to do."""

from __future__ import annotations

from sgray.serve.routing.policy import Question, least_busy
from sgray.serve.routing.replica import ReplicaState


class RoundRobin:
    """One after the other, in the order of their names."""

    def choose(self, question: Question) -> ReplicaState:
        """The next one."""
        ordered = sorted(question.candidates, key=lambda replica: replica.name)
        return ordered[question.turn % len(ordered)]


class LeastLoad:
    """The fewest requests."""

    def choose(self, question: Question) -> ReplicaState:
        """The least busy one."""
        return least_busy(question.candidates, question)
