"""Laws on the text of the package: where the environment is read, what is annotated, how long things are."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sgray"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]

# config.py reads it; the supervisor hands it on to the process that it starts.
ENVIRONMENT_USERS = {"config.py", "supervisor.py"}
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120  # what Triton compiles cannot be cut as freely
MAX_MEDIAN_LINES = 10
# Serve copies a router's class and the globals of its module; a real module is the only place where the two meet.
REGISTRIES = {"serve/table.py"}
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_there_is_something_to_check() -> None:
    assert {"config.py", "cli.py", "supervisor.py"} <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_environment_is_used_only_where_it_may_be(path: Path) -> None:
    used = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb", "putenv"):
            used.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            used += [node.lineno for alias in node.names if alias.name in ("environ", "getenv", "environb", "putenv")]
    assert used == [] or str(path.relative_to(PACKAGE)) in ENVIRONMENT_USERS, f"lines {used}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_function_is_annotated_in_full(path: Path) -> None:
    bare = []
    for function in functions(path):
        if is_kernel(function):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        arguments += [one for one in (function.args.vararg, function.args.kwarg) if one is not None]
        named = [one for one in arguments if one.arg not in ("self", "cls")]
        if function.returns is None or any(one.annotation is None for one in named):
            bare.append(f"{function.name} (line {function.lineno})")
    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    too_long = [
        one.name
        for one in functions(path)
        if lines_of(one) > (MAX_KERNEL_LINES if is_kernel(one) else MAX_FUNCTION_LINES)
    ]
    assert too_long == []


def test_half_of_all_functions_are_short() -> None:
    assert statistics.median(lines_of(one) for path in FILES for one in functions(path)) < MAX_MEDIAN_LINES


@pytest.mark.parametrize("path", [path for path in FILES if path.read_text().strip()], ids=lambda path: path.name)
def test_every_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{path} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_module_keeps_mutable_state(path: Path) -> None:
    """No `global`, and no list, set or dictionary that a function of the module could fill."""
    found = [f"global in line {node.lineno}" for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
    for statement in tree(path).body:
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_empty_container(value):
            found.append(f"empty container in line {statement.lineno}")
    assert found == [] or str(path.relative_to(PACKAGE)) in REGISTRIES


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("list", "dict", "set")
        and not value.args
    )


def test_there_is_no_drawer() -> None:
    assert [name for name in NAMES if DRAWERS & set(Path(name).with_suffix("").parts)] == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_nothing_is_pickled_or_evaluated(path: Path) -> None:
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [
                f"{module} in line {node.lineno}" for module in modules if module in ("pickle", "dill", "marshal")
            ]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.append(f"{node.func.id} in line {node.lineno}")
    assert found == []
