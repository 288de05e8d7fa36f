"""What is wrong with a grammar that a client sent, by the place in it."""

from __future__ import annotations


class GrammarFault(ValueError):
    """`place` is where in the client's text: a JSON Pointer, a position, a rule; empty for the whole of it."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"at {place}: {reason}" if place else reason)
        self.place = place
        self.reason = reason
