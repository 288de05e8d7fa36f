"""Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018), keyed by the start of the prompt."""

from __future__ import annotations

import math

from sgray.serve.routing.policy import Question, rendezvous
from sgray.serve.routing.replica import ReplicaState

KEY_TOKENS = 2048
BOUND = 1.25  # times the mean number of requests


class ConsistentHash:
    """The prompt's first tokens name an order of replicas; the first that is not clearly busier than the mean."""

    def choose(self, question: Question) -> ReplicaState:
        """The home of the prompt's start, or who comes after it."""
        hashes, candidates = question.hashes, question.candidates
        last = min(len(hashes), max(1, KEY_TOKENS // question.page_size)) - 1
        key = hashes[last] if hashes else question.turn
        limit = math.ceil(BOUND * (sum(one.num_requests for one in candidates) + 1) / len(candidates))
        ordered = sorted(candidates, key=lambda one: rendezvous(key, one.name), reverse=True)
        return next((one for one in ordered if one.num_requests < limit), ordered[0])
