"""The two types that scheduler and executor exchange: one `StepPlan` down, one `StepResult` up. No torch.

A step computes, for every scheduled sequence, the tokens `[start, start + length)`. There are no phases: a decode has
length 1, a prefill chunk as many as the budget gives, a prefix hit a `start` above zero. Plans carry differences: the
runner keeps, by slot, what an `Admission` told it and the row of pages so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgray.protocol import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot; whatever the slot held before is forgotten.

    `tokens` are all tokens known so far; `tokens[num_prompt:]` were generated before a retraction. `end_ids` may not be
    drawn while fewer than `sampling.min_new_tokens` tokens are generated. `seed` and the index of the generated token
    alone fix the random draw, so neither batch-mates nor retraction change a result.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    num_prompt: int
    tokens: list[int]
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The lists `slots` .. `samples` have one entry a scheduled sequence, in batch order.

    `new_pages[i]` are appended to the page row of `slots[i]`, which then covers `starts[i] + lengths[i]` tokens.
    `tokens` is flat, `sum(lengths)` long. `samples[i]` says that the last computed position gives the next token.
    `copies` are (source page, destination page), done before everything else.
    """

    step: int
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_pages: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a plan, lists in the plan's batch order.

    `tokens[i]` is the drawn id, or -1 where `samples[i]` was false. `logprobs[i]` is set where the sequence asked for
    logprobs and a token was drawn. `prompt_logprobs[i]`, for a sequence that asked for them, has one entry for each
    prompt token in `[start + 1, start + length + 1)` that exists: the logprob of that token given what stands before.
    `errors` maps an index to a message when that sequence alone failed (its logits were not finite).
    """

    step: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs] | None]
    errors: dict[int, str] = field(default_factory=dict)
