"""Reasoning apart from the answer: one incremental parser, driven by a table of tags.

The formats are those of SGLang's parsers of the same names. Reasoning stands at the beginning of the text, once:
- white space around the tags belongs to neither side;
- reasoning that is never closed is reasoning to its end, for half a thought is no answer;
- an opening tag inside reasoning is text of it, and so is any tag inside the answer.
The result does not depend on how the text was cut into pieces. Knows neither tokens nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sgray.text.source import Source, Waiting


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of one family.

    `is_forced`: the text begins inside the reasoning, also without an opening tag. `breaks` are marks that end the
    reasoning as well, and belong to the answer: some models call a tool without closing their thoughts.
    `has_channels`: the tags are the beginnings of messages, which come in any number; see `sgray.text.channels`, which
    needs the special tokens in the text.
    """

    begin: str = "<think>"
    end: str = "</think>"
    is_forced: bool = False
    breaks: tuple[str, ...] = ()
    has_channels: bool = False


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek-r1": ReasoningFormat(is_forced=True),
        "deepseek-v3": ReasoningFormat(),
        "glm45": ReasoningFormat(),
        "gpt-oss": ReasoningFormat("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", has_channels=True),
        "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
        "kimi_k2": ReasoningFormat(breaks=("<|tool_calls_section_begin|>",)),
        "qwen3": ReasoningFormat(),
        "qwen3-thinking": ReasoningFormat(is_forced=True),
    }
)


@dataclass(frozen=True, slots=True)
class Split:
    """What a piece of text gave: reasoning, and the answer that comes after it."""

    reasoning: str = ""
    content: str = ""


def starts_inside(form: ReasoningFormat, prompt: str) -> bool | None:
    """Whether an answer to `prompt` begins inside reasoning; None where the prompt does not say.

    Templates open the reasoning for the model, or open and close it to forbid it.
    """
    prompt = prompt.rstrip()
    if prompt.endswith(form.end):
        return False
    return True if prompt.endswith(form.begin) else None


def goes_on_inside(form: ReasoningFormat, message: str) -> bool | None:
    """Whether text that continues `message` begins inside reasoning; None where the message is empty."""
    if not message.strip():
        return None
    return message.rfind(form.begin) > message.rfind(form.end)


class ReasoningParser:
    """Splits one stream of text. Use `push` for each piece, then `finish` once.

    `is_inside` says whether the text begins inside reasoning; None leaves it to the format and the text. With
    `is_verbatim` nothing is lost: tags and the white space around them count as reasoning.
    """

    def __init__(self, form: ReasoningFormat, *, is_inside: bool | None = None, is_verbatim: bool = False) -> None:
        self._form = form
        self._is_verbatim = is_verbatim
        self._source = Source()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._blanks = ""
        self._is_answer = is_inside is False
        self._reader = self._read(form.is_forced if is_inside is None else is_inside)

    def push(self, text: str) -> Split:
        """Take the next piece of text; returns what is certain."""
        if self._is_answer:
            return Split(content=text)
        self._source.text += text
        self._run()
        return self._taken()

    def finish(self) -> Split:
        """The text has ended; returns what was held back."""
        self._source.is_ended = True
        if not self._is_answer:
            self._run()
        return self._taken()

    def _run(self) -> None:
        if next(self._reader, True):  # it yields None as long as it needs more
            self._is_answer = True

    def _taken(self) -> Split:
        split = Split("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return split

    def _read(self, is_inside: bool) -> Waiting[None]:
        """Everything up to the answer, which begins with what is left."""
        source, form = self._source, self._form
        source.is_pinned = True
        blanks = yield from source.blanks()
        if (yield from source.accept(form.begin)):
            blanks += form.begin
        elif not is_inside:
            source.position = 0
            self._rest()
            return
        blanks += yield from source.blanks()
        source.is_pinned = False
        if self._is_verbatim:
            self._reasoning.append(blanks)
        mark = yield from source.pass_until((form.end, *form.breaks), self._think)
        if self._is_verbatim:
            self._reasoning.append(self._blanks)
        if mark == form.end:
            yield from source.accept(mark)
            blanks = yield from source.blanks()
            if self._is_verbatim:
                self._reasoning.append(mark + blanks)
        self._rest()

    def _think(self, text: str) -> None:
        """Reasoning; white space at its end waits for what follows."""
        kept = text.rstrip()
        if not kept:
            self._blanks += text
            return
        self._reasoning.append(self._blanks + kept)
        self._blanks = text[len(kept) :]

    def _rest(self) -> None:
        self._content.append(self._source.text[self._source.position :])
        self._source.position = len(self._source.text)
