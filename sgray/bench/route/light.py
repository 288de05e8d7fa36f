"""A replica in a few lines, for simulations of thousands: whole prompts one after the other, decoding in long strides.

It keeps what routing depends on: a cache of blocks with least-recently-used eviction and exact events, a queue, and
decode steps that are longer with more sequences and slower beside prompts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sgray.bench.route.arrivals import BLOCK
from sgray.bench.route.timing import Size, Timing
from sgray.protocol import CacheEvent, Delta, Finish, Load, Request, StepReport, namespace_key, page_hashes

STRIDE_S = 0.25  # the longest step without a prompt
NAMESPACE = namespace_key()


@dataclass(order=True, slots=True)
class _Decoding:
    ends_at: float  # on the replica's own count of tokens a sequence
    id: str
    num_tokens: int = field(compare=False)


@dataclass(slots=True)
class _Waiting:
    request: Request
    hashes: list[int]
    num_uncached: int


class LightReplica:
    """The same questions as the engine's replica, answered at the cost of a dictionary."""

    def __init__(self, timing: Timing, size: Size, clock: Callable[[], float]) -> None:
        self._timing = timing
        self._size = size
        self._page = BLOCK // size.grain
        self._room = size.memory_tokens // BLOCK
        self._held: dict[int, None] = {}  # oldest first
        self._waiting: deque[_Waiting] = deque()
        self._waiting_tokens = 0
        self._decoding: list[_Decoding] = []
        self._resident = 0
        self._made = 0.0  # tokens a sequence that decodes since the start
        self._prefill: _Waiting | None = None
        self._cached = 0
        self._seconds = 0.0
        self._steps = self._prompt = self._found = self._generated = self._requests = 0
        self.computed = 0

    def submit(self, request: Request) -> None:
        """Take a request."""
        self._requests += 1
        hashes = page_hashes(request.tokens, self._page, NAMESPACE)
        one = _Waiting(request, hashes, len(request.tokens) - self._num_cached(request, hashes))
        self._waiting.append(one)
        self._waiting_tokens += one.num_uncached

    def begin(self) -> float | None:
        """Begin a step: the oldest waiting prompt as a whole, or a stride of decoding."""
        if not self._waiting and not self._decoding:
            return None
        timing, grain = self._timing, self._size.grain
        each = timing.decode_s(len(self._decoding), self._resident * grain) * grain
        if self._waiting and len(self._decoding) < self._size.max_running:
            one = self._prefill = self._waiting.popleft()
            self._waiting_tokens -= one.num_uncached
            self._cached = self._touch(one)
            fresh = len(one.request.tokens) - self._cached
            seconds = timing.prefill_s(self._cached * grain, fresh * grain)
            strides = fresh / self._size.mixed_tokens if self._decoding else 0.0
            self._seconds = max(timing.step_s, seconds + strides * each)
            self._made += strides
        else:
            strides = max(1e-9, min(self._decoding[0].ends_at - self._made, STRIDE_S / each))
            self._seconds = strides * each
            self._made += strides
        return self._seconds

    def end(self) -> StepReport:
        """End the step."""
        self._steps += 1
        deltas, events = [], []
        while self._decoding and self._decoding[0].ends_at <= self._made + 1e-6:
            done = heapq.heappop(self._decoding)
            self._resident -= done.num_tokens
            deltas.append(Delta(done.id, [0], finish=Finish("length")))
        one, self._prefill = self._prefill, None
        if one is not None:
            request = one.request
            length, output = len(request.tokens), request.sampling.max_new_tokens
            self._prompt += length
            self._found += self._cached
            self._generated += output
            self.computed += length - self._cached
            finish = Finish("length") if output <= 1 else None
            deltas.append(Delta(request.id, [0], finish=finish, cached_tokens=self._cached))
            if finish is None:
                heapq.heappush(self._decoding, _Decoding(self._made + output - 1, request.id, length))
                self._resident += length
            events = self._store(one.hashes)
        return StepReport(deltas, events, self._load())

    def snapshot(self) -> list[int]:
        """The hash of every stored page."""
        return list(self._held)

    def _num_cached(self, request: Request, hashes: list[int]) -> int:
        depth = next((depth for depth, page in enumerate(hashes) if page not in self._held), len(hashes))
        return min(depth * self._page, len(request.tokens) - 1)

    def _touch(self, one: _Waiting) -> int:
        """How many tokens are cached; their pages are the newest now."""
        cached = self._num_cached(one.request, one.hashes)
        for page in reversed(one.hashes[: -(-cached // self._page)]):
            del self._held[page]
            self._held[page] = None
        return cached

    def _store(self, hashes: list[int]) -> list[CacheEvent]:
        new = [page for page in reversed(hashes) if page not in self._held]
        self._held.update(dict.fromkeys(new))
        surplus = max(0, len(self._held) + self._resident // self._page - self._room)
        gone = [page for page, _ in zip(self._held, range(surplus), strict=False)]
        for page in gone:
            del self._held[page]
        return [CacheEvent(kind, pages) for kind, pages in (("stored", new), ("removed", gone)) if pages]  # type: ignore[arg-type]

    def _load(self) -> Load:
        return Load(
            running=len(self._decoding),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting_tokens,
            resident_tokens=self._resident,
            total_pages=self._room,
            steps=self._steps,
            prompt_tokens=self._prompt,
            cached_tokens=self._found,
            generation_tokens=self._generated,
            requests=self._requests,
            last_step_s=self._seconds,
        )
