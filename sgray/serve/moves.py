"""One answer on its way over replicas that may die under it: what to ask the next one, and what the caller sees of it.

Pure: no IO, no clock. What makes a continued answer equal to an undisturbed one is the engine's doing (`num_generated`
of a `Request`), together with the seed, which has to be fixed before the first replica draws a token. The idea of
sending prompt and answer so far to another replica is that of request migration in NVIDIA's Dynamo.
"""

from __future__ import annotations

from dataclasses import replace

from sgray.protocol import NO_LOGPROBS, Delta, EngineInfo, Request
from sgray.serve.call_names import moved_id


class Journey:
    """`request` is what to send to the next replica; `seed` counts where the caller gave none.

    `num_moves` are the replicas that were lost so far; `has_begun`: the caller has seen something of the answer;
    `is_aborted`: it was stopped while no replica had it.
    """

    def __init__(self, request: Request, seed: int) -> None:
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        self.request = request
        self.num_moves = 0
        self.has_begun = False
        self.is_aborted = False
        self._first = request
        self._generated: list[int] = []
        self._info: EngineInfo | None = None

    def take(self, delta: Delta, info: EngineInfo) -> Delta:
        """What the caller gets of a replica's delta: nothing of what comes but once comes again."""
        had_begun, self.has_begun = self.has_begun, True
        self._generated += delta.tokens
        self._info = info
        if self.num_moves == 0:
            return delta
        return replace(
            delta,
            id=self._first.id,
            cached_tokens=None if had_begun else delta.cached_tokens,
            prompt_logprobs=None if had_begun else delta.prompt_logprobs,
        )

    def move(self) -> None:
        """The replica is lost: from now on `request` asks for the rest of the answer."""
        self.num_moves += 1
        first, generated = self._first, self._generated
        sampling = replace(first.sampling, prompt_logprobs=NO_LOGPROBS) if self.has_begun else first.sampling
        self.request = replace(
            first,
            id=moved_id(first.id, self.num_moves),
            tokens=first.tokens + generated,
            sampling=sampling,
            num_generated=len(generated),
        )

    def fits(self, info: EngineInfo) -> bool:
        """Whether an engine may continue: another model's tokens would make no sense behind what there is."""
        return self._info is None or _model(self._info) == _model(info)


def _model(info: EngineInfo) -> tuple[object, ...]:
    return info.model_dir, info.architecture, info.vocab_size, info.context_length, info.end_ids
