"""What crosses a process border: plain data, no behaviour beyond validation of shapes, no third-party types.

Token counts are in tokens, times in seconds. Everything here is a frozen dataclass of integers, floats, strings and
lists, so that any typed codec can carry it (the link uses msgpack; nothing is ever pickled).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
MarkName = Literal["queued", "scheduled", "first_token", "retracted", "finished"]

NO_LOGPROBS = -1
# What one sequence may ask for at most; on a GPU every slot has room for so many. End ids of the model count as well.
MAX_LOGIT_BIASES = 512
MAX_END_IDS = 128
MAX_LOGPROB_IDS = 512


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Values are already validated at the border that made the object.

    `logprobs`: NO_LOGPROBS for none, 0 for the chosen token alone, k for the k best with it; so for `prompt_logprobs`,
    where the prompt's tokens before `prompt_logprobs_start` get none and may come from the cache. `logprob_ids` are ids
    whose logprobs come with each of these, whatever their rank.
    `top_k` 0 means no limit. `seed` None means that the engine draws one. Stop strings are not here: text is cut by
    whoever turns tokens into text.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = NO_LOGPROBS
    prompt_logprobs: int = NO_LOGPROBS
    prompt_logprobs_start: int = 0
    logprob_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sequence's generated text must match, as data; whoever made it has checked what can be checked cheaply.

    `source` is a JSON schema (as JSON), a regular expression, a grammar in GBNF, or a structural tag (as JSON).
    `after`: token ids, the end of the model's reasoning; the grammar holds for what is generated behind the first time
    that they stand in the generated text. Empty: for all of it.
    """

    kind: GrammarKind
    source: str
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. A call with n > 1 is n requests; their common prompt is computed once.

    `id` is unique over all ingresses. `salt` keeps the prefix cache of callers apart. Larger `priority` goes first.
    The last `num_generated` of `tokens` are an answer's beginning that another engine gave: this one goes on as if it
    had drawn them itself, and tells only what comes after them. All of `sampling` means the whole answer.
    `timeout_s`: the answer is of no use any more so many seconds after the engine got the request.
    `program` names what this is a part of and what is likely to come back to its prefix: its requests meet in one place
    where that costs nothing, and what they computed is kept longer, until the program is said to have ended.
    `trace_headers` are the W3C trace context of what this is a part of, by header name; empty where nobody traces it.
    """

    id: str
    tokens: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    salt: str = ""
    grammar: Grammar | None = None
    num_generated: int = 0
    timeout_s: float | None = None
    program: str = ""
    trace_headers: dict[str, str] = field(default_factory=dict)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) - self.num_generated


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of one token and of the best alternatives, (token id, logprob), best first.

    `of_ids` are the logprobs of the sampling parameters' `logprob_ids`, in their order.
    """

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    of_ids: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error of `sgray.errors` as data."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended. `matched` is the end or stop token id that ended it; `error` is set for reason "error"."""

    reason: FinishReason
    matched: int | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True)  # not frozen: one is made for every token, and that takes five times as long for frozen ones
class Delta:
    """What one step added to one request; the last one carries `finish`. Nobody changes it once it is made.

    `tokens` holds the new ids, the ending id included. `logprobs` is as long as `tokens` when asked for, else None.
    `cached_tokens` is set on the first delta alone: prompt tokens that were not computed. `prompt_logprobs` comes once,
    on the first delta that has tokens: one entry a prompt token, None for the first and for those not asked for.
    """

    id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of one replica's prefix cache: pages, by chained hash, that can now be hit or no longer can.

    `cleared` stands alone (empty `hashes`): everything is gone.
    """

    kind: Literal["stored", "removed", "cleared"]
    hashes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do and how full it is, as of the end of a step. Counters are totals since its start."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # uncached prompt tokens not yet computed, running prefills included
    resident_tokens: int = 0  # tokens in key-value memory that running sequences hold
    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # in the tree and evictable
    leased_pages: int = 0  # locked in the tree or private to a running sequence
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    retracted: int = 0
    refused: int = 0
    last_step_s: float = 0.0  # duration of the last step
    prefill_tokens_per_s: float = 0.0  # measured speed, 0 until known
    decode_step_s: float = 0.0  # measured duration of a step without prefill, 0 until known


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a request, at `at_s` of the engine's clock; `step` is the newest step it had part in.

    `num_tokens` were known then, of prompt and answer. `num_cached` of them came from the cache when it began to run,
    for the last time if it did so twice.
    """

    name: MarkName
    step: int
    at_s: float
    num_tokens: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Trail:
    """The way of one request through an engine, from the mark "queued" to "finished"; of traced requests alone."""

    request: Request
    marks: list[Mark]
    finish: Finish


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything one engine step tells the outside. `trails` are of traced requests that have ended."""

    deltas: list[Delta]
    events: list[CacheEvent]
    load: Load
    trails: list[Trail] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded engine that others need; constant for its life."""

    model_name: str
    model_dir: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    end_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    max_running_requests: int


def namespace_key(*, weights_version: str = "", adapter: str = "", salt: str = "", media: str = "") -> bytes:
    """The root of a chain of page hashes. Fields are tagged and length-prefixed, so no two sets of fields collide."""
    digest = hashlib.blake2b(digest_size=16, person=b"sgray-namespace")
    for tag, value in ((b"w", weights_version), (b"a", adapter), (b"s", salt), (b"m", media)):
        raw = value.encode()
        digest.update(tag + len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def page_hashes(tokens: SequenceOf[int], page_size: int, namespace: bytes) -> list[int]:
    """Chained 64-bit hashes of the whole pages of `tokens`: equal hash means equal page and equal everything before.

    Stable between processes and machines, unlike `hash()`.
    """
    return chain_hashes(tokens, page_size, int.from_bytes(namespace[:8], "little"))


def chain_hashes(tokens: SequenceOf[int], page_size: int, parent: int) -> list[int]:
    """The hashes of the whole pages of `tokens`, continued from the hash `parent` of what stands before them."""
    raw = array("q", tokens)
    hashes: list[int] = []
    for end in range(page_size, len(raw) + 1, page_size):
        digest = hashlib.blake2b(parent.to_bytes(8, "little"), digest_size=8)
        digest.update(raw[end - page_size : end].tobytes())
        parent = int.from_bytes(digest.digest(), "little")
        hashes.append(parent)
    return hashes
