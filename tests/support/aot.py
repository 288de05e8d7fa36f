"""Compiles kernels for GPUs on a machine that has none, and says what is wrong with the result.

Run as a program with one file of builds (`tests/kernels/builds_*.py`, each with a function `builds() -> list[Build]`);
prints a line of JSON for each build. TRITON_INTERPRET must not be set. The disassembler comes with Triton.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = GPUTarget("cuda", 90, 32)
OTHERS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 100, 32), GPUTarget("hip", "gfx942", 64))
MAX_SHARED_BYTES = 227 * 1024
PATTERNS = {name: rf"\b{name}" for name in ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDG.E.128")}


@dataclass(frozen=True)
class Build:
    """One configuration as it is shipped.

    `signature` maps arguments to Triton types ("*bf16", "i32", ...), `aligned` names those that are multiples of 16 at
    run time. `expect` names SASS instructions that must occur on Hopper, `forbid` PTX instructions that must not,
    `max_stack` the bytes of spills allowed there. `portable` is false for a form that is only chosen on Hopper.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    expect: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    max_stack: int = 0
    portable: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        constants = " ".join(f"{key}={value}" for key, value in self.constants.items())
        return f"{self.kernel.__name__} {constants} warps={self.num_warps} stages={self.num_stages}"


def compile_for(build: Build, target: GPUTarget) -> Any:
    """The compiled kernel."""
    names = list(build.kernel.arg_names)
    source_type = GluonASTSource if build.kernel.is_gluon() else ASTSource
    source = source_type(
        fn=build.kernel,
        signature={**build.signature, **dict.fromkeys(build.constants, "constexpr")},
        constexprs=build.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned},
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, **build.options}
    return triton.compile(source, target=target, options=options)


def complaints(build: Build) -> list[str]:
    """What speaks against shipping this build."""
    compiled = compile_for(build, HOPPER)
    usage, listing = _disassemble(compiled.asm["cubin"])
    registers, stack = (int(_number(pattern, usage)) for pattern in (r"REG:(\d+)", r"STACK:(\d+)"))
    shared = compiled.metadata.shared
    found = []
    if stack > build.max_stack:
        found.append(f"{stack} bytes of stack a thread ({registers} registers)")
    if shared > MAX_SHARED_BYTES:
        found.append(f"{shared} bytes of shared memory")
    found += [f"no {name}" for name in build.expect if not re.search(PATTERNS[name], listing)]
    found += [f"{name} in its PTX" for name in build.forbid if name in compiled.asm["ptx"]]
    if build.portable:
        found += list(_failures(lambda target: compile_for(build, target)))
    return found


def _failures(attempt: Callable[[GPUTarget], Any]) -> Iterator[str]:
    for target in OTHERS:
        try:
            attempt(target)
        except Exception as error:
            yield f"does not compile for {target.backend} {target.arch}: {error!r:.300}"


def _disassemble(cubin: bytes) -> tuple[str, str]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return tuple(
            subprocess.run([tools / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, text
    return found.group(1)


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("builds", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for build in module.builds():
        print(json.dumps({"name": build.name, "complaints": complaints(build)}), flush=True)


if __name__ == "__main__":
    sys.modules["aot"] = sys.modules["__main__"]
    main(sys.argv[1])
