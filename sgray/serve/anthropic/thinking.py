"""`thinking` of Anthropic's API on models that think in their own way: which variable of their template says so.

Without a parser of reasoning a server cannot tell thoughts from answers, so it refuses to be asked for thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from sgray.errors import InvalidRequestError
from sgray.serve.openai.schemas import Body
from sgray.serve.openai.validate import missing, shown, wrong_value
from sgray.text.reasoning import REASONING_FORMATS

MIN_BUDGET = 1024

_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"deepseek-v3": "thinking", "glm45": "enable_thinking", "kimi_k2": "thinking", "qwen3": "enable_thinking"}
)


class Thinking(Body):
    """`thinking` of a call."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="adaptive leaves it to the model; between_tools is refused."
    )
    budget_tokens: int | None = Field(
        None, description="Of type enabled, which needs it. A wish: max_tokens bounds thoughts and answer together."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves thoughts out of the answer; else they are there in full."
    )

    def check(self, max_tokens: int) -> None:
        """Raises InvalidRequestError where type and budget do not fit each other or the call's limit."""
        place, budget = "thinking.budget_tokens", self.budget_tokens
        if self.type == "enabled":
            if budget is None:
                missing(place, place)
            if not MIN_BUDGET <= budget < max_tokens:
                reason = f"{shown(budget)} is not from {MIN_BUDGET} to less than max_tokens, {shown(max_tokens)}."
                wrong_value(place, place, reason)
        elif budget is not None:
            wrong_value(place, place, "it belongs to type 'enabled' alone.")


def template_variables(thinking: Thinking | None, parser: str | None) -> dict[str, bool]:
    """The variables of the chat template that make a model think or not; none where it decides by itself."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    if thinking.type == "between_tools":
        raise _unsupported("a model thinks before its answer, or not at all")
    is_enabled = thinking.type == "enabled"
    if parser is None:
        if is_enabled:
            names = ", ".join(REASONING_FORMATS)
            raise _unsupported(f"set api.reasoning_parser (--reasoning-parser) to one of {names}")
        return {}
    if not is_enabled and REASONING_FORMATS[parser].is_forced:
        raise _unsupported("this model always thinks")
    return {_VARIABLES[parser]: is_enabled} if parser in _VARIABLES else {}


def _unsupported(reason: str) -> InvalidRequestError:
    message = f"'thinking' of this type is not supported: {reason}."
    return InvalidRequestError(message, param="thinking", code="unsupported_parameter")
