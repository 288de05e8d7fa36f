"""How fast replicas are, learned from their reports: prompt tokens a second, and what a decode step costs.

All replicas of a deployment are taken to be alike, so each one's report teaches about all. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgray.protocol import Load

FADE = 0.999  # what is left of an old report's weight after one more
ENOUGH_S = 0.05  # seconds of measured steps with prompts in them, before they count
ENOUGH_STEPS = 50
PRIOR_STEPS = 8.0  # what the constants weigh against measured decode steps


@dataclass(frozen=True, slots=True)
class SpeedPrior:
    """Stands in until replicas have measured themselves; the shape of a decode step of an 8B model on one GPU."""

    prefill_tokens_per_s: float = 2000.0
    decode_step_s: float = 0.02
    base_batch: int = 16  # a step costs as much as this many sequences, before the first
    sequence_share: float = 0.06  # of an empty step, that a sequence adds
    context_share: float = 5e-6  # of an empty step, that a token of context adds
    expected_output: float = 128.0  # tokens


class Speeds:
    """The fit. All figures are in seconds and tokens and always positive."""

    def __init__(self, prior: SpeedPrior) -> None:
        self._prior = prior
        self._computed = 0.0
        self._computing_s = 0.0
        self._known_prefill = 0.0  # the best that a replica measured itself
        self._known_decode = 0.0
        self._fit = _PlaneFit()
        self._made = 0.0
        self._ended = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens that a replica with a backlog gets done a second, beside its decoding."""
        if self._computing_s >= ENOUGH_S and self._computed > 0:
            return self._computed / self._computing_s
        return self._known_prefill or self._prior.prefill_tokens_per_s

    @property
    def sequence_s(self) -> float:
        """What one more sequence adds to a decode step."""
        return self._decode_costs()[1]

    @property
    def context_s(self) -> float:
        """What one more token of context adds to a decode step."""
        return self._decode_costs()[2]

    @property
    def expected_output(self) -> float:
        """Tokens that a request generates."""
        weight = 4.0
        return (self._made + weight * self._prior.expected_output) / (self._ended + weight)

    def learn(self, before: Load, after: Load) -> None:
        """Two reports of one replica, the second the next after the first."""
        self._known_prefill = max(self._known_prefill, after.prefill_tokens_per_s)
        if after.decode_step_s:
            known = self._known_decode
            self._known_decode = min(known, after.decode_step_s) if known else after.decode_step_s
        steps = after.steps - before.steps
        if steps <= 0 or before.steps == 0:
            return
        step_s = steps * after.last_step_s
        computed = (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)
        ended = after.requests - before.requests - (after.running + after.waiting - before.running - before.waiting)
        self._made = self._made * FADE + after.generation_tokens - before.generation_tokens
        self._ended = self._ended * FADE + max(0, ended)
        if before.waiting_tokens or after.waiting_tokens or computed:
            self._computed = self._computed * FADE + max(0, computed)
            self._computing_s = self._computing_s * FADE + step_s
        elif steps == 1 and after.running:
            self._fit.add(after.running, after.resident_tokens, after.last_step_s)

    def _decode_costs(self) -> tuple[float, float, float]:
        """Seconds of an empty step, a sequence, a token of context."""
        prior = self._prior
        if self._fit.weight >= ENOUGH_STEPS:
            return self._fit.solve(prior.sequence_share, prior.context_share)
        step = self._known_decode or prior.decode_step_s
        empty = step / (1 + prior.sequence_share)
        return empty, empty * prior.sequence_share, empty * prior.context_share


class _PlaneFit:
    """Step time as `empty + sequences * s + context * c`: least squares over fading samples, none of them negative."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums = [0.0] * 8  # of x, y, z, xx, xy, yy, xz, yz: x sequences, y thousands of tokens, z milliseconds
        self._solved: tuple[float, float, float] | None = None
        self._age = 0

    def add(self, sequences: int, context: int, seconds: float) -> None:
        x, y, z = float(sequences), context / 1000.0, seconds * 1000.0
        new = (x, y, z, x * x, x * y, y * y, x * z, y * z)
        self._sums = [old * FADE + one for old, one in zip(self._sums, new, strict=True)]
        self.weight = self.weight * FADE + 1.0
        self._age += 1

    def solve(self, sequence_share: float, context_share: float) -> tuple[float, float, float]:
        """The coefficients, pulled a little to the given shares of an empty step, in seconds and tokens."""
        if self._solved is None or self._age >= ENOUGH_STEPS:
            self._age = 0
            self._solved = self._solve(sequence_share, context_share * 1000)
        return self._solved

    def _solve(self, sequence_share: float, context_share: float) -> tuple[float, float, float]:
        n = self.weight
        x, y, z, xx, xy, yy, xz, yz = (one / n for one in self._sums)
        empty = z / (1 + sequence_share * x + context_share * y)
        s0, c0 = empty * sequence_share, empty * context_share
        pull = PRIOR_STEPS / (PRIOR_STEPS + n)
        var_x, var_y, cov = xx - x * x + pull * xx, yy - y * y + pull * yy, xy - x * y
        rest_x, rest_y = xz - x * z + pull * xx * s0, yz - y * z + pull * yy * c0
        determinant = var_x * var_y - cov * cov
        if determinant <= 1e-12 * var_x * var_y:
            return empty / 1e3, s0 / 1e3, c0 / 1e6
        s = max(0.05 * s0, (rest_x * var_y - rest_y * cov) / determinant)
        c = max(0.05 * c0, (rest_y * var_x - rest_x * cov) / determinant)
        return max(0.0, z - s * x - c * y) / 1e3, s / 1e3, c / 1e6
