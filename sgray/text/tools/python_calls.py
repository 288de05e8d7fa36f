"""Calls as a Python list: `[weather(city="Oslo"), now()]`, the notation of Llama 4 and some small Llamas.

It is parsed and never run: arguments must be literals given by name. A list is given out when it is complete.
"""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import dataclass

from sgray.text.source import Source, Waiting
from sgray.text.tools.calls import Calls

_END = "<|python_end|>"


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of calls, anywhere in the text."""

    marks: tuple[str, ...] = ("<|python_start|>", "[")
    bare: str = ""

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """See `Notation`. A call of an unknown tool is content, and the ones beside it still are calls."""
        yield from source.accept(self.marks[0])
        yield from source.blanks()
        begin = source.position
        if not (yield from _begins_call(source)):
            return False
        source.position = begin
        if not (yield from _bracketed(source)):
            return False
        text = source.text[begin : source.position]
        items = _items(text)
        known = [_call(item, calls) for item in items]
        if not any(known):
            return False
        for item, found in zip(items, known, strict=True):
            if found is None:
                calls.content(ast.get_source_segment(text, item) or "")
                continue
            calls.start(found[0])
            calls.arguments(found[1])
            calls.end(is_whole=True)
        yield from source.accept(_END)
        source.is_pinned = False
        return True


def _begins_call(source: Source) -> Waiting[bool]:
    """Read a bracket, a name and a parenthesis, which is how most texts with brackets do not go on."""
    if not (yield from source.accept("[")):
        return False
    yield from source.blanks()
    begin = source.position
    while char := (yield from source.peek()):
        if not char.isalnum() and char not in "_.":
            break
        source.position += 1
    return source.position > begin and char == "("


def _bracketed(source: Source) -> Waiting[bool]:
    """Read up to the bracket that closes the one here; brackets in strings do not count."""
    depth, quote, is_escaped = 0, "", False
    while char := (yield from source.peek()):
        source.position += 1
        if quote:
            quote = "" if char == quote and not is_escaped else quote
            is_escaped = char == "\\" and not is_escaped
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[({") - (char in "])}")
            if not depth:
                return True
    return False


def _items(text: str) -> list[ast.expr]:
    """The items of a Python list; none where the text is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it thinks of the model's style
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return tree.body.elts if isinstance(tree.body, ast.List) else []


def _call(item: ast.expr, calls: Calls) -> tuple[str, str] | None:
    """The name and the arguments as JSON; None where the item is no call of a known tool with named literals."""
    if not isinstance(item, ast.Call) or item.args:
        return None
    try:
        name = ast.unparse(item.func)
        values = {_named(keyword): ast.literal_eval(keyword.value) for keyword in item.keywords}
        return (name, json.dumps(values, allow_nan=False)) if name in calls.tools else None
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _named(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("arguments that are unpacked have no names")
    return keyword.arg
