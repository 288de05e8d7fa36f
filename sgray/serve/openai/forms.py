"""What the forms of answers have in common: a whole answer, and chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sgray.protocol import Usage
from sgray.serve.openai.choices import Choice, Piece

Json = dict[str, Any]


class Form(Protocol):
    """How one call's answer is written. It knows the call's id and model, and nothing of HTTP."""

    def opening(self, index: int) -> list[Json]:
        """The chunks that come before the first piece of a choice."""
        ...

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The chunks of one piece. A piece of text alone, without finish and entries, makes exactly one."""
        ...

    def closing(self, usage: Usage) -> list[Json]:
        """The chunks after the last piece."""
        ...

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Any:
        """The whole answer from all pieces of all choices."""
        ...


@dataclass(frozen=True)
class RunningUsage:
    """A form whose every chunk carries the counts of the call so far; `usage` tells them."""

    form: Form
    usage: Callable[[], Usage]

    def opening(self, index: int) -> list[Json]:
        """The inner form's, with counts."""
        return self._counted(self.form.opening(index))

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The inner form's, with counts."""
        return self._counted(self.form.chunks(choice, piece))

    def closing(self, usage: Usage) -> list[Json]:
        """The inner form's, which has the counts of the whole call."""
        return self.form.closing(usage)

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Any:
        """The inner form's."""
        return self.form.whole(choices, usage)

    def _counted(self, chunks: list[Json]) -> list[Json]:
        return [chunk | {"usage": usage_json(self.usage())} for chunk in chunks]


def usage_json(usage: Usage) -> Json:
    """Token counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
