"""What scheduler and executor exchange, one `StepPlan` down and one `StepResult` up, and how. No torch.

A step computes, for every scheduled sequence, the tokens `[start, start + length)`. There are no phases: a decode has
length 1, a prefill chunk as many as the budget gives, a prefix hit a `start` above zero. Plans carry differences: the
runner keeps, by slot, what an `Admission` told it and the row of pages so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sgray.protocol import SamplingParams, TokenLogprobs

ON_DEVICE = -1
"""Stands in a plan for the token that the executor drew last for that slot, in the plan before, unknown to the host."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot; whatever the slot held before is forgotten.

    `tokens` are all tokens known so far; `tokens[num_prompt:]` were generated before a retraction. `end_ids` may not be
    drawn while fewer than `sampling.min_new_tokens` tokens are generated. `seed` and the index of the generated token
    alone fix the random draw, so neither batch-mates nor retraction change a result. With `is_masked`, every plan that
    draws for the sequence has a mask for it.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    num_prompt: int
    tokens: list[int]
    end_ids: tuple[int, ...] = ()
    is_masked: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The lists `slots` .. `samples` have one entry a scheduled sequence, in batch order.

    `new_pages` are (slot, place, page): entry `place` of that slot's row of pages becomes `page`. Places of a slot come
    in order and without a gap, and then its row covers `starts[i] + lengths[i]` tokens. `tokens` is flat and
    `sum(lengths)` long; the last one of a sequence may be `ON_DEVICE`. `samples[i]` says that the last computed
    position gives the next token. `copies` are (source page, destination page), done before everything else. `masks`
    says, by index in the batch, which ids may be drawn: id i where bit i % 8 of byte i // 8 is set, in whole words of
    32 bits; what the last word says of ids beyond the vocabulary means nothing. `shared` are (begin, end, indices):
    these sequences of the batch have the positions `[begin, end)`, computed before this step, in the same pages. They
    stand as `shared_spans` gives them, and may be left out: they say what can be read once, and change no result.
    """

    step: int
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    shared: list[tuple[int, int, list[int]]] = field(default_factory=list)


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


class Executor(Protocol):
    """Executes plans, on one rank or on many, each after all that was submitted before.

    That order lets the pages and the slot of a finished sequence go to another one at once, while a step that still
    writes them is in flight: every write of a later plan comes after it, and its own result is not looked at.
    """

    @property
    def depth(self) -> int:
        """How many steps may be in flight while the next one is planned: 0 or 1."""

    @property
    def reads_shared(self) -> bool:
        """Whether it makes use of `StepPlan.shared`."""

    def submit(self, plan: StepPlan) -> None:
        """Begin a step. If it raises, that plan is gone and those before it can still be collected."""

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan; its result. If it raises, the plan is gone; `reset` drops the others."""

    def reset(self) -> None:
        """Drop what is in flight: it will not be collected. New plans may follow. Must not raise."""

    def fault(self) -> str | None:
        """Why no step will ever succeed again, if so. May be called from any thread."""

    def close(self) -> None:
        """End what runs outside of this process. No plan follows. May be called twice."""
