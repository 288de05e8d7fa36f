"""The rules of other projects, for comparison: the longest match wins, unless. Each as published, with its defaults.

They are given this router's exact picture of caches and its counts of requests, which is more than they have at home.
"""

from __future__ import annotations

from sgray.serve.routing.policy import Question, deepest, least_busy
from sgray.serve.routing.replica import ReplicaState


class SGLangCacheAware:
    """SGLang's cache-aware router: the longest match above half of the prompt, while loads are balanced."""

    ratio = 0.5
    gap = 32  # requests
    factor = 1.1

    def choose(self, question: Question) -> ReplicaState:
        """The least busy one if loads are out of balance or nobody holds half of it."""
        counts = [one.num_requests for one in question.candidates]
        low, high = min(counts), max(counts)
        if high - low > self.gap and high > self.factor * low:
            return least_busy(question.candidates, question)
        best = deepest(question)
        if question.match(best[0]) > self.ratio:
            return least_busy(best, question)
        return least_busy(question.candidates, question)


class RayPrefix:
    """Ray Serve's PrefixCacheAffinityRouter: the longest match from a tenth on, else the smallest cache. It has no
    limit of imbalance unless one is set."""

    ratio = 0.1

    def choose(self, question: Question) -> ReplicaState:
        """The shortest queue among the best."""
        best = deepest(question)
        if question.match(best[0]) >= self.ratio:
            return least_busy(best, question)
        smallest = min(one.num_pages for one in question.candidates)
        return least_busy([one for one in question.candidates if one.num_pages == smallest], question)


class LlmdSticky:
    """llm-d's affinity filter: stay with deep matches until they have much more to compute than the others."""

    ratio = 0.8
    most_s = 14.0  # of prefill, that a deep match may be ahead

    def choose(self, question: Question) -> ReplicaState:
        """The least uncached work, own included, among those that are left."""
        deep = [one for one in question.candidates if question.match(one) >= self.ratio]
        rest = [one for one in question.candidates if question.match(one) < self.ratio]
        considered = deep or list(question.candidates)
        if deep and rest:
            ahead = min(map(question.backlog, deep)) - min(map(question.backlog, rest))
            if ahead > self.most_s * question.speeds.prefill_tokens_per_s:
                considered = list(question.candidates)
        return min(considered, key=lambda one: (self._work(one, question), one.num_requests, one.recent))

    @staticmethod
    def _work(one: ReplicaState, question: Question) -> float:
        return question.backlog(one) + question.num_tokens - question.cached(one)
