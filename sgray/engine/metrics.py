"""Measured speed of one engine, as the router needs it: prefill tokens a second and the time of a step without prefill.

Pure arithmetic on durations in seconds.
"""

from __future__ import annotations

FADE = 0.95  # what is left of an old step's weight after one more step of its kind


class StepSpeed:
    """Two fading averages over the steps so far; both are 0 until known.

    `best_prefill_tokens_per_s` is the most that one average ever was, over steps of `full_step` prompt tokens and more:
    what a long prompt may hope for, where short ones, slower by far, are most of the work. 0 until known.
    """

    def __init__(self, full_step: int = 1) -> None:
        self.last_step_s = 0.0
        self.best_prefill_tokens_per_s = 0.0
        self._full_step = full_step
        self._full = _FadingRatio()
        self._decode = _FadingRatio()
        self._prefill = _FadingRatio()

    @property
    def decode_step_s(self) -> float:
        """Duration of a step that only decodes."""
        return self._decode.value

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second of prefill."""
        return self._prefill.value

    def record(self, duration_s: float, num_prefill: int, num_decode: int) -> None:
        """One step: how long it took, prompt tokens and decoding sequences in it.

        In a mixed step the prefill gets what is beyond the known time of a pure decode step, at least half.
        """
        self.last_step_s = duration_s
        if num_prefill == 0:
            self._decode.add(duration_s, 1.0)
        elif duration_s > 0:
            decode_s = self.decode_step_s if num_decode else 0.0
            prefill_s = max(duration_s - decode_s, duration_s / 2)
            self._prefill.add(num_prefill, prefill_s)
            if num_prefill >= self._full_step:
                self._full.add(num_prefill, prefill_s)
                self.best_prefill_tokens_per_s = max(self.best_prefill_tokens_per_s, self._full.value)


class _FadingRatio:
    """Sum of amounts over sum of weights, old ones fading."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        return self._amount / self._weight if self._weight else 0.0

    def add(self, amount: float, weight: float) -> None:
        self._amount = self._amount * FADE + amount
        self._weight = self._weight * FADE + weight
