"""What a user's function holds: it adds expressions to a state and reads variables from it.

Adding never waits; reading a variable waits for it. In an async program the same is done with `await s.get(name)`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

from sgray.lang.expressions import Expression, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Sequel, as_expression
from sgray.lang.stream import Join, News, Stream
from sgray.lang.transcript import common_length

JOIN_MODES = ("gather_variable", "concate_and_append")
JoinMode = Literal["gather_variable", "concate_and_append"]


class ProgramState:
    """A program that runs or has run. `return_value` is what the user's function returned."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.return_value: Any = None

    # Adding.

    def __iadd__(self, other: Expression | str) -> ProgramState:
        self.stream.submit(as_expression(other))
        return self

    def system(self, expr: Expression | str | None = None) -> Any:
        """A message of the system, or a context in which what is added belongs to one."""
        return self._role("system", expr)

    def user(self, expr: Expression | str | None = None) -> Any:
        """A message of the user, or a context in which what is added belongs to one."""
        return self._role("user", expr)

    def assistant(self, expr: Expression | str | None = None) -> Any:
        """A message of the assistant, or a context in which what is added belongs to one."""
        return self._role("assistant", expr)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """What is written inside is the value of the variable `name`."""
        self.stream.submit(ScopeBegin(name))
        yield
        self.stream.submit(ScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup:
        """`size` branches that go on from here, each on its own."""
        if size < 1:
            raise ValueError(f"a fork has at least one branch, not {size}")
        if position_ids_offset is not None:
            raise ValueError("position_ids_offset is not supported: branches go on at the position of their trunk")
        return ProgramStateGroup([ProgramState(stream) for stream in self.stream.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """One branch, which is joined at the end of the context."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()

    def join(
        self, branches: ProgramStateGroup | Sequence[ProgramState], mode: JoinMode = "gather_variable"
    ) -> ProgramState:
        """Take over what the branches have found, and with "concate_and_append" also what they have written.

        For a variable `name` of the branches there is then the list `name`, and `name_0`, `name_1`, ... by branch.
        """
        if mode not in JOIN_MODES:
            raise ValueError(f"mode {mode!r} is not one of {', '.join(JOIN_MODES)}")
        streams = tuple(branch.stream for branch in branches)
        self.stream.submit(Join(streams, appends=mode == "concate_and_append"))
        return self

    # Reading.

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        self._wait(self.stream.when_known(name))
        return name in self.stream.variables

    def get_var(self, name: str) -> Any:
        """The variable, once it is known. Raises KeyError if nothing sets it, or the error that it is missing for."""
        self._wait(self.stream.when_known(name))
        return self._value(name)

    async def get(self, name: str) -> Any:
        """`get_var` for async programs."""
        await asyncio.wrap_future(self.stream.when_known(name))
        return self._value(name)

    def set_var(self, name: str, value: Any) -> None:
        """Give a variable a value."""
        self.stream.set_variable(name, value)

    def get_meta_info(self, name: str) -> Any:
        """What the backend told about the variable's generation: token counts, finish reason, logprobs."""
        self.get_var(name)
        return self.stream.meta_info.get(name)

    def text(self) -> str:
        """Everything written so far as the model reads it, the marks of messages included."""
        self.sync()
        return self.stream.backend.loop.run(self.stream.backend.render(self.stream.transcript.prompt()))

    async def text_async(self) -> str:
        """`text` for async programs."""
        await self.wait()
        backend = self.stream.backend
        return await asyncio.wrap_future(backend.loop.submit(backend.render(self.stream.transcript.prompt())))

    def messages(self) -> list[dict[str, str]]:
        """The messages written so far, in OpenAI's form."""
        self.sync()
        return self.stream.transcript.messages()

    def sync(self) -> None:
        """Wait for everything that was added. Raises nothing; see `error`."""
        self._wait(self.stream.when_ended())

    async def wait(self) -> None:
        """`sync` for async programs."""
        await asyncio.wrap_future(self.stream.when_ended())

    def error(self) -> BaseException | None:
        """What the program failed of, if it did, once it has ended."""
        self.sync()
        return self.stream.error

    def cancel(self) -> None:
        """Stop what runs, in all branches too; their requests are aborted."""
        self.stream.cancel()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The texts of a variable, or everything written, in pieces as they come (with `stream=True`)."""
        reader = _Reader(self.stream, var_name)
        loop = self.stream.backend.loop
        while (future := reader.more()) is not None:
            self._wait(future)
            for item in reader.take():
                if text := loop.run(reader.text_of(item)):
                    yield text
        reader.check()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for coroutines. With `return_meta_data` each piece is (text, what is known of the variable)."""
        reader = _Reader(self.stream, var_name)
        loop = self.stream.backend.loop
        while (future := reader.more()) is not None:
            await asyncio.wrap_future(future)
            for item in reader.take():
                if text := await asyncio.wrap_future(loop.submit(reader.text_of(item))):
                    meta = self.stream.meta_info.get(var_name or "")
                    yield (text, meta) if return_meta_data else text
        reader.check()

    def __repr__(self) -> str:
        names = ", ".join(self.stream.variables)
        return f"ProgramState({self.stream.transcript.written!r}, variables: {names or 'none'})"

    def _role(self, role: str, expr: Expression | str | None) -> Any:
        if expr is None:
            return self._in_role(role)
        self.stream.submit(Sequel((RoleBegin(role), *as_expression(expr).parts(), RoleEnd(role))))
        return self

    @contextmanager
    def _in_role(self, role: str) -> Iterator[None]:
        self.stream.submit(RoleBegin(role))
        yield
        self.stream.submit(RoleEnd(role))

    def _wait(self, future: Future[None]) -> None:
        self.stream.backend.loop.wait(future)

    def _value(self, name: str) -> Any:
        stream = self.stream
        if stream.is_known(name):
            return stream.variables[name]
        if stream.error is not None:
            raise stream.error
        known = ", ".join(stream.variables) or "none"
        raise KeyError(f"no expression so far sets the variable {name!r}; there are: {known}")


class ProgramStateGroup:
    """The branches of a fork, in order."""

    def __init__(self, states: list[ProgramState], trunk: ProgramState) -> None:
        self.states = states
        self.src_state = trunk

    def join(self, mode: JoinMode = "gather_variable") -> ProgramState:
        """See `ProgramState.join`."""
        return self.src_state.join(self, mode)

    def __iadd__(self, other: Expression | str | Sequence[Any] | Callable[[int], Any]) -> ProgramStateGroup:
        """Add to every branch: the same, one of a list each, or what a function of the number gives."""
        if isinstance(other, Sequence) and not isinstance(other, str):
            if len(other) != len(self.states):
                raise ValueError(f"{len(other)} expressions for {len(self.states)} branches")
            added = list(other)
        elif callable(other):
            added = [other(number) for number in range(len(self.states))]
        else:
            added = [other] * len(self.states)
        for state, one in zip(self.states, added, strict=True):
            state += one
        return self

    def __getitem__(self, number: int) -> ProgramState:
        return self.states[number]

    def __setitem__(self, number: int, state: ProgramState) -> None:
        """Python's own half of `group[i] += ...`: the state is the one that is there."""
        if state is not self.states[number]:
            raise ValueError("a branch cannot be replaced by another state")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)


class _Reader:
    """Reads the news of a stream once, of one variable or of all."""

    def __init__(self, stream: Stream, name: str | None) -> None:
        self._stream = stream
        self._name = name
        self._position = 0
        self._sent = ""
        self._ended = stream.ended()

    def more(self) -> Future[None] | None:
        """Done when there is more to take; None when nothing will come."""
        with self._stream.lock:
            if self._has_more() or not self._is_over():
                return self._stream.when(lambda: self._has_more() or self._is_over())
        return None

    def take(self) -> list[News]:
        """What has come since the last call; of all text, only what the last whole state does not hold already."""
        news = self._stream.news[self._position :]
        self._position += len(news)
        if self._name is not None:
            return [item for item in news if item.name == self._name and item.prompt is None]
        last = max((number for number, item in enumerate(news) if item.prompt is not None), default=0)
        return news[last:]

    async def text_of(self, item: News) -> str:
        """The text that the item adds to what was given out."""
        if item.prompt is None:
            self._sent += item.text
            return item.text
        text = await self._stream.backend.render(item.prompt)
        if self._sent.startswith(text.rstrip()):  # a template may leave out blanks at an open end
            return ""
        rest = text[common_length(self._sent, text) :]
        self._sent = text
        return rest

    def check(self) -> None:
        """Raise what the stream failed of, unless the variable is there all the same."""
        error = self._stream.error
        if error is not None and not (self._name is not None and self._stream.is_known(self._name)):
            raise error

    def _has_more(self) -> bool:
        return len(self._stream.news) > self._position

    def _is_over(self) -> bool:
        return self._ended() or (self._name is not None and self._stream.is_known(self._name))


def cancel_when_dropped(state: ProgramState) -> None:
    """Cancel the program when nobody holds this state any more."""
    weakref.finalize(state, state.stream.cancel).atexit = False
