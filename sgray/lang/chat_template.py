"""Chat templates by name, for programs that choose one, and for models that have none of their own.

Without a name the model's own template is used, which is almost always right. Names are SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sgray.lang.transcript import Prompt


@dataclass(frozen=True)
class ChatTemplate:
    """What stands before and after the messages of each role. `stops` end an answer."""

    name: str
    marks: Mapping[str, tuple[str, str]]
    start: str = ""
    stops: tuple[str, ...] = ()
    default_system: str | None = None

    def render(self, prompt: Prompt) -> str:
        """The prompt as text; raises ValueError for a role that the template has no marks for."""
        text = ""
        if prompt.is_chat:
            text = self.start
            if self.default_system is not None and prompt.turns[0].role != "system":
                before, after = self.marks["system"]
                text += before + self.default_system + after
        for part in prompt.parts:
            if isinstance(part, str):
                text += part
                continue
            if part.role not in self.marks:
                raise ValueError(f"the template {self.name!r} has no messages of {part.role!r}")
            before, after = self.marks[part.role]
            text += before + part.content + ("" if part.is_open else after)
        return text

    def with_stops(self, stop: str | Sequence[str] | None) -> list[str]:
        """Its own stop strings after those given."""
        given = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
        return [*given, *(one for one in self.stops if one not in given)]


_TEMPLATES: Mapping[str, ChatTemplate] = MappingProxyType(
    {
        template.name: template
        for template in (
            ChatTemplate(
                "default",
                {"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n")},
            ),
            ChatTemplate(
                "chatml",
                {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")},
                stops=("<|im_end|>",),
            ),
            ChatTemplate(
                "llama-3-instruct",
                {
                    role: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
                    for role in ("system", "user", "assistant")
                },
                stops=("<|eot_id|>",),
            ),
            ChatTemplate(
                "llama-2-chat",
                {
                    "system": ("<<SYS>>\n", "\n<</SYS>>\n\n"),
                    "user": ("[INST] ", " [/INST]"),
                    "assistant": ("", " </s><s>"),
                },
                stops=("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
            ),
            ChatTemplate(
                "vicuna_v1.1",
                {"system": ("", " "), "user": ("USER:", " "), "assistant": ("ASSISTANT:", "</s>")},
                stops=("USER:",),
            ),
        )
    }
)


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name; raises ValueError with the names there are."""
    if name not in _TEMPLATES:
        raise ValueError(f"no chat template is called {name!r}; there are {', '.join(sorted(_TEMPLATES))}")
    return _TEMPLATES[name]
