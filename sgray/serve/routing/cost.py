"""Our policy: the replica where the request costs everybody together the least time.

The cost follows the published idea of routing by marginal delay (Preble, Dynamo's cost function): own wait, own
prefill, what filling the cache takes from others later, and how much longer everybody's decode steps become.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sgray.serve.routing.policy import Question, program_key, rendezvous
from sgray.serve.routing.replica import ReplicaState

MANY = 64  # candidates; of more only some are looked at
SAMPLE = 16  # of those that do not match, by the prompt and by the turn


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of the cost, in seconds and tokens."""

    cache_tax: float = 2.0  # times own prefill: what filling the cache takes from others later
    stall_tax: float = 0.02  # share of own prefill that each running request waits
    wait_tax: float = 1.0  # the same for each waiting request: as many will come until they are served
    decode_weight: float = 0.1
    attention_context: float = 40_000.0  # tokens of context that double what computing a prompt token takes
    near_s: float = 0.01  # costs closer than this, or than `near_share`, are equal
    near_share: float = 0.03
    peer_share: float = 0.5  # of own prefill, by which costs may differ and be equal where there are other routers
    bounded_share: float = 1.1  # equals above this multiple of their mean recent work are passed over


class LeastCost:
    """Takes O(pages + matching replicas + 64) a choice, however many replicas there are."""

    def __init__(self, model: CostModel | None = None) -> None:
        self._model = model or CostModel()

    def choose(self, question: Question) -> ReplicaState:
        """The cheapest; among equals the deepest match, the program's home, then the one that all routers agree on."""
        model, considered = self._model, _considered(question)
        costs = [self.cost(replica, question) for replica in considered]
        least = min(costs)
        slack = max(model.near_s, model.near_share * least)
        if question.peers > 1.5:
            slack += (
                model.peer_share * (1 - 1 / question.peers) * question.num_tokens / question.speeds.prefill_tokens_per_s
            )
        near = [one for one, cost in zip(considered, costs, strict=True) if cost <= least + slack]
        depth = max(question.depth(one) for one in near)
        equal = [one for one in near if question.depth(one) == depth]
        if question.home and (home := next((one for one in equal if one.name == question.home), None)) is not None:
            return home
        hashes = question.hashes
        # Independent ingresses agree on the home of a cold prefix; a prompt without a page has that of its program.
        if hashes:
            page = hashes[min(depth, len(hashes) - 1)]
        else:
            page = program_key(question.program) if question.program else question.turn
        return max(self._not_ahead(equal), key=lambda one: rendezvous(page, one.name))

    def cost(self, replica: ReplicaState, question: Question) -> float:
        """Seconds."""
        model, speeds, load = self._model, question.speeds, replica.load
        speed, others = speeds.prefill_tokens_per_s, replica.num_requests
        uncached = question.num_tokens - question.cached(replica)
        mean_context = question.num_tokens - uncached / 2
        own_s = uncached / speed * (1 + mean_context / model.attention_context)
        context = load.resident_tokens + load.waiting_tokens + replica.unseen_tokens
        step_s = (context + others * question.num_tokens) * speeds.context_s + 2 * others * speeds.sequence_s
        decode_s = model.decode_weight * speeds.expected_output * step_s
        waiting = load.waiting + len(replica.unseen)
        taxes = model.cache_tax + model.stall_tax * others + model.wait_tax * waiting
        return question.backlog(replica) / speed + (1 + taxes) * own_s + decode_s

    def _not_ahead(self, equal: list[ReplicaState]) -> list[ReplicaState]:
        """Those that did not get clearly more work than the others lately; never empty."""
        mean = sum(replica.recent for replica in equal) / len(equal)
        return [replica for replica in equal if replica.recent <= self._model.bounded_share * mean] or equal


def _considered(question: Question) -> Sequence[ReplicaState]:
    """All candidates; of many the deepest matches, some that the prompt names, and some that the turn names."""
    candidates = question.candidates
    if len(candidates) <= MANY:
        return candidates
    matching = sorted((one for one in candidates if one.number in question.depths), key=question.depth)
    key = question.hashes[-1] if question.hashes else question.turn
    named = random.Random(key).sample(candidates, SAMPLE) + random.Random(question.turn).sample(candidates, SAMPLE)
    return list(dict.fromkeys([*matching[-(MANY - 2 * SAMPLE) :], *named]))
