"""What a program would write, found without a backend: its function runs on placeholders, and its words are kept.

The trace ends where the function reads a variable or does with an argument what only a value can do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgray.lang.errors import UnavailableError
from sgray.lang.expressions import Constant, Expression
from sgray.lang.state import ProgramState
from sgray.lang.transcript import Transcript


class _ReadError(Exception):
    """The function asks for something that only a run has."""


@dataclass(frozen=True)
class Argument(Expression):
    """Stands for an argument that a run brings."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        raise _ReadError(attribute)

    def __str__(self) -> str:
        raise _ReadError(self.name)

    __format__ = __iter__ = __len__ = __bool__ = __getitem__ = __int__ = lambda self, *_: _stop()


@dataclass
class Trace:
    """The expressions in order; `branches` are the traces of what was forked. `is_whole`: the function ran through."""

    expressions: list[Expression] = field(default_factory=list)
    branches: list[Trace] = field(default_factory=list)
    is_whole: bool = False

    @property
    def prefix(self) -> str:
        """The text that every run begins with."""
        text = ""
        for expression in self.expressions:
            if not isinstance(expression, Constant):
                break
            text += expression.text
        return text


class _Recorder:
    """Stands where a stream stands; has no backend, so nothing can be read."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.transcript = Transcript()
        self.variables: dict[str, Any] = {}

    def submit(self, expression: Expression) -> None:
        self._trace.expressions.extend(expression.parts())

    def fork(self, size: int) -> list[_Recorder]:
        traces = [Trace(is_whole=True) for _ in range(size)]
        self._trace.branches += traces
        return [_Recorder(trace) for trace in traces]

    def set_variable(self, name: str, value: Any) -> None:
        self.variables[name] = value

    def __getattr__(self, name: str) -> Any:
        raise _ReadError(name)


def record(func: Callable[..., Any], names: Sequence[str], given: Mapping[str, Any]) -> Trace:
    """The trace of `func` with placeholders for the arguments `names`."""
    if inspect.iscoroutinefunction(func):
        raise UnavailableError("an async program cannot be traced: what it awaits exists only in a run")
    trace = Trace()
    state = ProgramState(_Recorder(trace))  # type: ignore[arg-type]
    try:
        func(state, **{name: Argument(name) for name in names}, **given)
    except _ReadError:
        return trace
    trace.is_whole = True
    return trace


def _stop() -> Any:
    raise _ReadError("a value")
