"""What every routing policy is asked and answers, and what several of them reckon alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgray.serve.routing.replica import ReplicaState
from sgray.serve.routing.speeds import Speeds


@dataclass(slots=True)
class Question:
    """A prompt of `num_tokens` tokens with these whole pages, and who could take it; there is at least one candidate.

    `depths`: replica number -> leading pages that it holds or will; absent for none. `turn` counts the questions.
    `peers`: how many routers there seem to be, this one included. `program` is what the prompt is a part of, and `home`
    the replica that another of its prompts was sent to last; both may be empty.
    """

    candidates: Sequence[ReplicaState]
    depths: dict[int, int]
    hashes: list[int]
    num_tokens: int
    page_size: int
    turn: int
    now: float
    speeds: Speeds
    peers: float = 1.0
    program: str = ""
    home: str = ""

    def depth(self, replica: ReplicaState) -> int:
        """Leading pages that it holds or will."""
        return self.depths.get(replica.number, 0)

    def cached(self, replica: ReplicaState) -> int:
        """Tokens that those save; the last prompt token is always computed."""
        return max(0, min(self.depth(replica) * self.page_size, self.num_tokens - 1))

    def match(self, replica: ReplicaState) -> float:
        """The share of the prompt that it holds or will."""
        return self.cached(replica) / self.num_tokens if self.num_tokens else 0.0

    def backlog(self, replica: ReplicaState) -> float:
        """Prompt tokens that it has to compute before a new one, as far as one can know now.

        What it reported, less what it has computed since; and what no report of it can have counted.
        """
        done = self.speeds.prefill_tokens_per_s * max(0.0, self.now - replica.heard)
        return max(0.0, replica.load.waiting_tokens - done) + replica.unseen_uncached


class Policy(Protocol):
    """A rule of choice. It may keep state of its own; the router does all booking."""

    def choose(self, question: Question) -> ReplicaState:
        """One of the candidates."""


def least_busy(replicas: Iterable[ReplicaState], question: Question) -> ReplicaState:
    """The one with the fewest requests; among equals the one with the least to compute, then by rendezvous."""
    return min(replicas, key=lambda one: (one.num_requests, one.unseen_uncached, -rendezvous(question.turn, one.name)))


def deepest(question: Question) -> list[ReplicaState]:
    """The candidates that hold the longest start of the prompt."""
    depth = max(question.depth(one) for one in question.candidates)
    return [one for one in question.candidates if question.depth(one) == depth]


def program_key(program: str) -> int:
    """A number that everybody reckons alike for this program."""
    return int.from_bytes(hashlib.blake2b(program.encode(), digest_size=8).digest(), "little")


def rendezvous(key: int, name: str) -> int:
    """A number that everybody draws alike for this key and replica: the largest one is the key's home."""
    digest = hashlib.blake2b((key & (2**64 - 1)).to_bytes(8, "little") + name.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
