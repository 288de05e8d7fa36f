"""`@function`: a Python function as a program, and the ways to run it.

The function itself runs in the thread that calls `run`, or, for a batch, in a thread of a pool while it is in its body;
everything that it starts runs on the backend's event loop. So a program whose body has returned holds no thread, and
its branches never do.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Literal

from tqdm import tqdm

from sgray.lang.defaults import Host, backend_of
from sgray.lang.errors import UnavailableError
from sgray.lang.expressions import Sampling
from sgray.lang.state import ProgramState, cancel_when_dropped
from sgray.lang.stream import Stream
from sgray.lang.tracing import Trace, record
from sgray.lang.transcript import Prompt

DEFAULTS = Sampling(
    max_new_tokens=128,
    temperature=1.0,
)
_SAMPLING_NAMES = frozenset(field.name for field in fields(Sampling)) - {"regex", "json_schema", "ebnf"}
_SAMPLING_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_MIN_PREFIX_CHARS = 64


def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a function, whose first parameter is `s`, a program."""
    if num_api_spec_tokens is not None:
        raise UnavailableError(
            "num_api_spec_tokens is not available: each gen is a call of its own, on the cached prefix; leave it out"
        )
    return Program if func is None else Program(func)


class Program:
    """A function `func(s, ...)`, which may be async, with arguments that are bound already."""

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        parameters = inspect.signature(func).parameters
        names = list(parameters)
        if not names or names[0] != "s":
            raise ValueError(f"the first parameter of a program is called s; {func.__name__}({', '.join(names)})")
        self.func = func
        self.arg_names = names[1:]
        self.bound = dict(bound or {})
        self._takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

    def bind(self, **arguments: Any) -> Program:
        """The program with these arguments given."""
        self._check(arguments)
        return Program(self.func, {**self.bound, **arguments})

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run; inside another program, with its state first, be a part of it."""
        if args and isinstance(args[0], ProgramState):
            return self.func(args[0], *args[1:], **{**self.bound, **options})
        return self.run(*args, **options)

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Host | None = None,
        use_thread: bool = True,
        **options: Any,
    ) -> ProgramState:
        """Run to the end and return the state; with `stream` return at once, to read texts as they come.

        Options are the function's arguments and the sampling of generations that bring none of their own
        (`max_new_tokens=128`, `temperature=1.0`, ...). Raises what the program fails of. `use_thread` has no meaning
        here: no branch needs a thread.
        """
        call = self._call(args, options, backend, is_streaming=stream)
        if stream:
            return _run_streaming(call)
        return call.run()

    async def run_async(
        self, *args: Any, stream: bool = False, backend: Host | None = None, **options: Any
    ) -> ProgramState:
        """`run` for coroutines, on any event loop. Cancelling it stops the program and its requests."""
        call = self._call(args, options, backend, is_streaming=stream)
        if stream:
            return _run_streaming(call)
        return await call.run_async()

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        backend: Host | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> Any:
        """Run for each item, a dictionary or a tuple of arguments; the states in their order.

        `num_threads` is how many run at once. An item that fails does not disturb the others: its state has the error.
        With `generator_style` states come one by one, as they are done.
        """
        calls = [self._call(*_split(item, options), backend, is_streaming=False) for item in batch_kwargs]
        limit = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else int(num_threads)
        if limit < 1:
            raise ValueError(f"num_threads is 'auto' or at least 1, not {num_threads}")
        states = _run_all(calls, limit, progress_bar=progress_bar)
        return states if generator_style else list(states)

    def trace(self, *, backend: Host | None = None, **arguments: Any) -> Trace:
        """What the program writes, found by running the function on placeholders; up to where it reads something."""
        given = {**self.bound, **arguments}
        self._check(given)
        return record(self.func, [name for name in self.arg_names if name not in given], given)

    def cache(self, backend: Host | None = None) -> str:
        """Compute the text that all runs begin with, so that it is in the prefix cache; returns it."""
        prefix = self.trace().prefix
        if len(prefix) >= _MIN_PREFIX_CHARS:
            chosen = backend_of(backend)
            chosen.loop.run(chosen.complete(Prompt((prefix,)), Sampling(max_new_tokens=0, temperature=0.0), None))
        return prefix

    def _call(
        self, args: Sequence[Any], options: Mapping[str, Any], backend: Host | None, *, is_streaming: bool
    ) -> _Call:
        given, sampling = {}, {}
        for name, value in options.items():
            other = _SAMPLING_ALIASES.get(name, name)
            if name in self.arg_names or other not in _SAMPLING_NAMES:
                given[name] = value
            elif value is not None:
                sampling[other] = value
        arguments = {**self.bound, **given}
        self._check(given)
        try:
            inspect.signature(self.func).bind(None, *args, **arguments)
        except TypeError as error:
            raise TypeError(f"{self.__name__}: {error}") from None
        defaults = Sampling(**sampling).over(DEFAULTS)
        return _Call(
            self.func, tuple(args), arguments, Stream(backend_of(backend), defaults, is_streaming=is_streaming)
        )

    def _check(self, arguments: Mapping[str, Any]) -> None:
        for name in arguments:
            if name not in self.arg_names and not self._takes_any:
                raise TypeError(
                    f"{self.__name__} has no argument {name!r}; it has {', '.join(self.arg_names) or 'none'}"
                )


SglFunction = Program


@dataclass(frozen=True)
class _Call:
    """One run of a function on a stream of its own."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    arguments: dict[str, Any]
    stream: Stream

    def run(self) -> ProgramState:
        """The whole run, in this thread."""
        state = self.body()
        try:
            state.sync()
        except BaseException:  # an interrupt: nobody will read the rest
            self.stream.cancel()
            raise
        if self.stream.error is not None:
            raise self.stream.error
        return state

    async def run_async(self) -> ProgramState:
        """The whole run; a function that is not async has a thread while it is in its body."""
        try:
            if inspect.iscoroutinefunction(self.func):
                state = await self.body_async()
            else:
                state = await asyncio.to_thread(self.body)
            await state.wait()
        except asyncio.CancelledError:
            self.stream.cancel()
            raise
        if self.stream.error is not None:
            raise self.stream.error
        return state

    def body(self) -> ProgramState:
        """The function alone; what it has started may go on. If it raises, everything is cancelled."""
        if inspect.iscoroutinefunction(self.func):
            return self.stream.backend.loop.run(self.body_async())
        state = ProgramState(self.stream)
        self.stream.life.enter_body()
        try:
            state.return_value = self.func(state, *self.args, **self.arguments)
        except BaseException as error:
            self.stream.fail(error)
            raise
        finally:
            self.stream.life.leave_body()
        return state

    async def body_async(self) -> ProgramState:
        """`body` of an async function."""
        state = ProgramState(self.stream)
        self.stream.life.enter_body()
        try:
            state.return_value = await self.func(state, *self.args, **self.arguments)
        except BaseException as error:
            self.stream.fail(error)
            raise
        finally:
            self.stream.life.leave_body()
        return state


def batch_infer(
    program: Program | Sequence[str],
    batch_kwargs: Sequence[Mapping[str, Any]] | None = None,
    *,
    backend: Host | None = None,
    **options: Any,
) -> Any:
    """`run_batch` of a program, or the continuation of each text of a list."""
    if isinstance(program, Program):
        return program.run_batch(batch_kwargs or [], backend=backend, **options)
    if batch_kwargs is not None or isinstance(program, str):
        raise TypeError("give a program with a list of arguments, or a list of texts alone")
    states = Program(_continue).run_batch([{"prompt": text} for text in program], backend=backend, **options)
    for state in states:
        if (error := state.error()) is not None:
            raise error
    return [state["answer"] for state in states]


def _continue(s: ProgramState, prompt: str) -> None:
    from sgray.lang.primitives import gen

    s += prompt + gen("answer")


def _run_streaming(call: _Call) -> ProgramState:
    """Start a run; a function that is not async has a thread while it is in its body.

    Dropping the state cancels the run.
    """
    state = ProgramState(call.stream)
    held = weakref.ref(state)
    cancel_when_dropped(state)
    if inspect.iscoroutinefunction(call.func):
        call.stream.feeder = call.stream.backend.loop.ident
        call.stream.backend.loop.submit(_stream_async(call, held))
        return state
    has_started = threading.Event()
    arguments = (call, held, has_started)
    threading.Thread(target=_stream_body, args=arguments, name="sgray-program", daemon=True).start()
    has_started.wait()
    return state


def _stream_body(call: _Call, held: weakref.ref[ProgramState], has_started: threading.Event) -> None:
    call.stream.feeder = threading.get_ident()
    has_started.set()
    try:
        _hand_over(call.body(), held)
    except BaseException:  # noqa: BLE001 - the stream has it, and gives it to whoever reads
        return
    finally:
        call.stream.end_feed()


async def _stream_async(call: _Call, held: weakref.ref[ProgramState]) -> None:
    try:
        _hand_over(await call.body_async(), held)
    except Exception:  # noqa: BLE001 - as above
        return
    finally:
        call.stream.end_feed()


def _hand_over(ended: ProgramState, held: weakref.ref[ProgramState]) -> None:
    state = held()
    if state is not None:
        state.return_value = ended.return_value


class _Batch:
    """Runs calls, at most `limit` at once. A thread is free when its call's body has returned, the call's place only
    when everything that it started is done.
    """

    def __init__(self, calls: Sequence[_Call], limit: int) -> None:
        self._threads = ThreadPoolExecutor(limit, "sgray-program")
        self._limit = limit
        self._lock = threading.Lock()
        self._runs = [(call, Future[None]()) for call in calls]
        self._left = deque(self._runs)

    def states(self, bar: Any) -> Iterator[ProgramState]:
        """The states in order, each as soon as it and those before it are done. Leaving early cancels what runs."""
        for _ in range(self._limit):
            self._start_next()
        try:
            for call, ended in self._runs:
                ended.result()
                bar.update()
                yield ProgramState(call.stream)
        finally:
            with self._lock:
                self._left.clear()
            for call, ended in self._runs:
                if not ended.done():
                    call.stream.cancel()
            self._threads.shutdown()

    def _start_next(self) -> None:
        with self._lock:
            if self._left:
                self._threads.submit(self._run, *self._left.popleft())

    def _run(self, call: _Call, ended: Future[None]) -> None:
        def finish(_: Future[None]) -> None:
            self._start_next()
            ended.set_result(None)

        try:
            call.body()
        except BaseException as error:  # noqa: BLE001 - the item's own error, which its state tells
            call.stream.fail(error)
        call.stream.when_idle().add_done_callback(finish)


class _Bar(tqdm):
    """A progress bar without tqdm's watcher, which is a thread that never ends."""

    monitor_interval = 0


def _run_all(calls: Sequence[_Call], limit: int, *, progress_bar: bool) -> Iterator[ProgramState]:
    with _Bar(total=len(calls), disable=not progress_bar) as bar:
        yield from _Batch(calls, limit).states(bar)


def _split(item: Any, options: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional and keyword arguments of one item."""
    if isinstance(item, Mapping):
        return (), {**options, **item}
    if isinstance(item, Sequence) and not isinstance(item, str):
        return tuple(item), dict(options)
    raise TypeError(f"an item of a batch is a dictionary or a tuple of arguments, not {type(item).__name__}")
