"""What may import what, and that an import does nothing but define names."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sgray"
FILES = sorted(PACKAGE.rglob("*.py"))

BRAIN = [
    "sgray.errors",
    "sgray.protocol",
    "sgray.config",
    "sgray.engine.plan",
    "sgray.engine.sequence",
    "sgray.engine.policy",
    "sgray.engine.scheduler",
    "sgray.engine.engine",
    "sgray.engine.loop",
    "sgray.memory.pages",
    "sgray.memory.radix",
    "sgray.memory.cache",
]

# Distribution names of what is imported under another name.
DISTRIBUTIONS = {"yaml": "pyyaml"}

OBSERVE = """
import json, os, sys, threading
environment, folder, listing = dict(os.environ), os.getcwd(), sorted(os.listdir("."))
threads = threading.active_count()
import importlib
importlib.import_module(sys.argv[1])
torch = sys.modules.get("torch")
print(json.dumps({
    "environment": sorted(k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)),
    "folder": os.getcwd() == folder,
    "files": sorted(os.listdir(".")) == listing,
    "threads": threading.active_count() - threads,
    "loaded": sorted(name for name in ("torch", "ray", "transformers", "numpy") if name in sys.modules),
    "cuda": bool(torch and torch.cuda.is_initialized()),
    "dtype": str(torch.get_default_dtype()) if torch else "torch.float32",
    "grad": torch.is_grad_enabled() if torch else True,
}))
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def observe(module: str, tmp_path: Path) -> dict[str, object]:
    """What importing one module in a new process changes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OBSERVE, module], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, f"{module} prints when it is imported: {done.stdout!r}"
    seen: dict[str, object] = json.loads(done.stdout)
    return seen


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout), done.stdout


@pytest.mark.parametrize("module", ["sgray", "sgray.cli", "sgray.launch_server", "sgray.bench.serve", *BRAIN])
def test_light_modules_load_nothing_heavy_and_change_nothing(module: str, tmp_path: Path) -> None:
    seen = observe(module, tmp_path)
    assert seen["loaded"] == []
    assert (seen["environment"], seen["folder"], seen["files"], seen["threads"]) == ([], True, True, 0)


def test_importing_everything_starts_nothing_and_changes_no_setting(tmp_path: Path) -> None:
    names = [module_name(path) for path in FILES if path.name != "__main__.py"]
    importer = tmp_path / "everything.py"
    importer.write_text(
        "import sys\nsys.path.insert(0, '.')\n"
        "import torch, ray, ray.serve, transformers\n"  # what third parties do to the process is not ours
        "import os, threading\n"
        "before = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count()\n"
        + "".join(f"import {name}\n" for name in names)
        + "after = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count()\n"
        "assert after == before, (before[1:], after[1:])\n"
        "assert torch.is_grad_enabled() and not torch.cuda.is_initialized() and not ray.is_initialized()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(importer)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_every_third_party_import_is_a_declared_dependency() -> None:
    declared = {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("-", "_") for line in _declared_dependencies()}
    imported = {name for path in FILES for name in _imported_packages(path)} - set(sys.stdlib_module_names) - {"sgray"}
    missing = {name for name in imported if DISTRIBUTIONS.get(name, name).lower() not in declared}
    # Triton comes with torch wherever there is a GPU. The extras `kernels` and `otel` name them.
    assert missing == {"triton", "opentelemetry"}


def test_only_kernels_import_triton() -> None:
    importers = {path.relative_to(PACKAGE).as_posix() for path in FILES if "triton" in _imported_packages(path)}
    assert importers
    assert {
        name for name in importers if not re.fullmatch(r"kernels/(launch|boxes|\w+/(kernel|hopper))\.py", name)
    } == set()


def _imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def _declared_dependencies() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return re.findall(r'"([^"]+)"', block.group(1))
