"""What the router knows of one replica, and its booking of one request. Times are of the router's clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgray.protocol import Load


@dataclass(eq=False, slots=True)
class Ticket:
    """One choice, alive from `choose` to `finish`."""

    replica: str
    num_tokens: int
    predicted_cached: int
    hashes: list[int]
    booked: float = 0.0
    has_started: bool = False

    @property
    def uncached(self) -> int:
        """Prompt tokens to compute, as predicted."""
        return self.num_tokens - self.predicted_cached


@dataclass(eq=False, slots=True)
class ReplicaState:
    """One replica: its own words (`stored`, `load`, `peers`) and what this router alone knows (its tickets).

    `unseen` are the tickets, oldest first, that the last report cannot have counted; `unseen_uncached` and
    `unseen_tokens` are their sums. `recent` is prompt tokens given to it to compute, old ones fading.
    """

    name: str
    number: int
    joined: float = 0.0
    load: Load = field(default_factory=Load)
    heard: float = 0.0  # when it last said something
    owes_since: float = 0.0  # when the oldest ticket since then was booked
    stored: set[int] = field(default_factory=set)
    promised: dict[int, int] = field(default_factory=dict)  # page -> requests in flight that need it
    tickets: set[Ticket] = field(default_factory=set)  # those of other routers included
    peers: dict[str, Ticket] = field(default_factory=dict)  # request -> what another router has booked
    unseen: dict[Ticket, None] = field(default_factory=dict)
    unseen_uncached: int = 0
    unseen_tokens: int = 0
    recent: float = 0.0
    is_young: bool = False

    @property
    def bit(self) -> int:
        """Its place in the picture."""
        return 1 << self.number

    @property
    def num_requests(self) -> int:
        """Requests that it has reported, and those that no report can have counted."""
        return self.load.running + self.load.waiting + len(self.unseen)

    @property
    def num_pages(self) -> int:
        """Pages that it holds or will, about."""
        return max(len(self.stored), len(self.promised))

    def book(self, ticket: Ticket) -> None:
        """Enter a ticket; the router's picture is not touched."""
        if not self.unseen:
            self.owes_since = ticket.booked
        self.tickets.add(ticket)
        self.unseen[ticket] = None
        self.unseen_uncached += ticket.uncached
        self.unseen_tokens += ticket.num_tokens
        promised = self.promised
        for page in ticket.hashes:
            promised[page] = promised.get(page, 0) + 1

    def see(self, ticket: Ticket) -> None:
        """What the replica reports counts this ticket from now on."""
        if ticket in self.unseen:
            del self.unseen[ticket]
            self.unseen_uncached -= ticket.uncached
            self.unseen_tokens -= ticket.num_tokens

    def see_until(self, moment: float) -> None:
        """What was booked before `moment` is counted by now."""
        while self.unseen and (oldest := next(iter(self.unseen))).booked < moment:
            self.see(oldest)

    def cancel(self, ticket: Ticket) -> list[int]:
        """Take a ticket out; the pages that it alone promised and that the replica never stored."""
        self.tickets.discard(ticket)
        self.see(ticket)
        broken: list[int] = []
        promised = self.promised
        for page in ticket.hashes:
            count = promised[page] - 1
            if count:
                promised[page] = count
            else:
                del promised[page]
                if page not in self.stored:
                    broken.append(page)
        return broken
