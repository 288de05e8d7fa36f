"""Chat messages as they grow out of an API that lists thoughts, texts and calls one after the other.

What the assistant thought, said and called in one turn is one message for a chat template. Knows no API: whoever fills
a conversation has checked what it says.
"""

from __future__ import annotations

from sgray.serve.openai.forms import Json

Content = str | list[Json]
"""A text, or chat's parts of text."""


class Conversation:
    """The messages so far, and the ids of all calls in them."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.call_ids: set[str] = set()

    def add(self, role: str, content: Content, **more: str) -> None:
        """A message of its own."""
        self.messages.append({"role": role, "content": content, **more})

    def extend(self, role: str, content: Content) -> None:
        """More of the last message, where it is of this role; else a message of its own."""
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] = _joined(self.messages[-1]["content"], content)
        else:
            self.add(role, content)

    def say(self, content: Content) -> None:
        """What the assistant says, in a turn of its own, but with what it thought before it or called around it."""
        turn = self._turn()
        if turn["content"] and "tool_calls" not in turn:
            turn = self._new_turn()
        turn["content"] = _joined(turn["content"], content)

    def think(self, text: str) -> None:
        """What the assistant thinks, with which a turn begins; an empty text where nobody knows what it was."""
        turn = self._turn()
        if turn["content"] or "tool_calls" in turn:
            self._new_turn()
        if text:
            self.muse(text)

    def muse(self, text: str) -> None:
        """What the assistant thinks anywhere in its turn."""
        turn = self._turn()
        thoughts = [turn["reasoning_content"], text] if "reasoning_content" in turn else [text]
        turn["reasoning_content"] = "\n".join(thoughts)

    def call(self, call: Json) -> None:
        """A call of the assistant, in its turn."""
        self.call_ids.add(call["id"])
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self) -> Json:
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_turn()

    def _new_turn(self) -> Json:
        self.add("assistant", "")
        return self.messages[-1]


def _joined(content: Content, more: Content) -> Content:
    if not content:
        return more
    return _parts(content) + _parts(more)


def _parts(content: Content) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
