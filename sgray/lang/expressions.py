"""What a program writes, as data: constants, generations, selections, roles. Knows neither backends nor threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sgray.lang.choices import ChoicesMethod

DType = type[int] | type[float] | type[str] | type[bool]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Sampling:
    """How text is generated; None means that whoever stands above decides. Names are SGLang's."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None

    def over(self, below: Sampling) -> Sampling:
        """These values, and those of `below` where there are none."""
        return dataclasses.replace(below, **self.given())

    def given(self) -> dict[str, Any]:
        """The values that are set."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class Expression:
    """Anything that can be added to a state. `+` joins expressions and texts."""

    def __add__(self, other: Expression | str) -> Expression:
        return Sequel((*self.parts(), *as_expression(other).parts()))

    def __radd__(self, other: str) -> Expression:
        return Sequel((*as_expression(other).parts(), *self.parts()))

    def parts(self) -> tuple[Expression, ...]:
        """The expressions that it consists of, in order."""
        return (self,)

    def names(self) -> Iterator[str]:
        """The variables that it sets."""
        return iter(())


@dataclass(frozen=True)
class Sequel(Expression):
    """Several expressions, one after the other."""

    items: tuple[Expression, ...]

    def parts(self) -> tuple[Expression, ...]:
        """The items."""
        return self.items


@dataclass(frozen=True)
class Constant(Expression):
    """A text."""

    text: str


@dataclass(frozen=True)
class RoleBegin(Expression):
    """A message begins."""

    role: str


@dataclass(frozen=True)
class RoleEnd(Expression):
    """The message ends."""

    role: str


@dataclass(frozen=True)
class Gen(Expression):
    """Text that the model writes. `dtype`: the variable holds the value that the text stands for."""

    name: str | None
    sampling: Sampling
    dtype: DType | None = None

    def names(self) -> Iterator[str]:
        """Its own."""
        return iter(() if self.name is None else (self.name,))


@dataclass(frozen=True)
class Select(Expression):
    """One of several texts, by what the model thinks of each."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod

    def names(self) -> Iterator[str]:
        """Its own."""
        return iter(() if self.name is None else (self.name,))


@dataclass(frozen=True)
class SeparateReasoning(Expression):
    """An expression whose generated texts are split in reasoning and answer. `form` names how the model marks it."""

    inner: Expression
    form: str

    def names(self) -> Iterator[str]:
        """Those inside, each with its reasoning."""
        for part in self.inner.parts():
            for name in part.names():
                yield from (name, reasoning_name(name))


@dataclass(frozen=True)
class ScopeBegin(Expression):
    """What is written from here on ..."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(Expression):
    """... to here is the variable's value."""

    name: str

    def names(self) -> Iterator[str]:
        """Its own."""
        return iter((self.name,))


def reasoning_name(name: str) -> str:
    """The variable that holds the reasoning before the answer `name`."""
    return f"{name}_reasoning_content"


def as_expression(value: object) -> Expression:
    """An expression itself, or a text as one; raises TypeError for anything else."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, str):
        return Constant(value)
    if value is None:
        raise ValueError("None was appended to a program; append a text or an expression such as gen(...)")
    raise TypeError(f"a text or an expression was expected, but got {type(value).__name__}: {value!r}")
