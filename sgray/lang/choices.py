"""How `select` decides between texts, from the log-probabilities of their tokens.

The three methods are SGLang's. Where two choices score alike the first one wins, so that a program repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Entry = Sequence[Any]  # [logprob, token id, text or None]
Entries = Sequence[Sequence[Entry]]  # one list for each choice


@dataclass(frozen=True)
class ChoicesDecision:
    """The text chosen, and what it was chosen by."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesMethod(Protocol):
    """A rule of choice. Any object of this form can be given to `select`."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the choices must also be scored without what stands before them, which is one more call."""
        ...

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Entries,
        output_token_logprobs: Entries,
        unconditional_token_logprobs: Entries | None = None,
    ) -> ChoicesDecision:
        """The decision. `normalized_prompt_logprobs` are the means of `input_token_logprobs`."""
        ...


@dataclass(frozen=True)
class TokenLengthNormalized:
    """The choice whose tokens are likeliest on average."""

    requires_unconditional_logprobs: bool = False

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Entries,
        output_token_logprobs: Entries,
        unconditional_token_logprobs: Entries | None = None,
    ) -> ChoicesDecision:
        """The highest mean."""
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        return ChoicesDecision(choices[_best(normalized_prompt_logprobs)], meta)


@dataclass(frozen=True)
class GreedyTokenSelection:
    """The choice that picking the likeliest token, one at a time, leads to.

    A choice that has no token left goes on with the mean of those it has.
    """

    requires_unconditional_logprobs: bool = False

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Entries,
        output_token_logprobs: Entries,
        unconditional_token_logprobs: Entries | None = None,
    ) -> ChoicesDecision:
        """The last that is not beaten at any position."""
        length = max(len(entries) for entries in input_token_logprobs)
        rows = [
            [entry[0] for entry in entries] + [mean] * (length - len(entries))
            for entries, mean in zip(input_token_logprobs, normalized_prompt_logprobs, strict=True)
        ]
        left = list(range(len(choices)))
        for position in range(length):
            highest = max(rows[index][position] for index in left)
            left = [index for index in left if rows[index][position] == highest]
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        return ChoicesDecision(choices[left[0]], meta | {"greedy_logprob_matrix": rows})


@dataclass(frozen=True)
class UnconditionalLikelihoodNormalized:
    """The choice that gains most by what stands before it: long or rare texts are not at a disadvantage."""

    requires_unconditional_logprobs: bool = True

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Entries,
        output_token_logprobs: Entries,
        unconditional_token_logprobs: Entries | None = None,
    ) -> ChoicesDecision:
        """The highest mean difference; a first token without an unconditional logprob counts with its own."""
        if unconditional_token_logprobs is None:
            raise ValueError("this method needs the choices' logprobs without what stands before them")
        gains = [
            mean([entry[0] - (other[0] or 0.0) for entry, other in zip(entries, others, strict=True)])
            for entries, others in zip(input_token_logprobs, unconditional_token_logprobs, strict=True)
        ]
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        meta |= {
            "unconditional_token_logprobs": unconditional_token_logprobs,
            "normalized_unconditional_prompt_logprobs": gains,
        }
        return ChoicesDecision(choices[_best(gains)], meta)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda index: scores[index])


def _meta(means: Sequence[float], of_input: Entries, of_output: Entries) -> dict[str, Any]:
    return {
        "normalized_prompt_logprobs": list(means),
        "input_token_logprobs": of_input,
        "output_token_logprobs": of_output,
    }
