"""Builds the fake GPU for one torch: ``python -m tests.fakegpu.build INCLUDE TORCH_LIB OUT``.

INCLUDE has NVIDIA's headers, TORCH_LIB the libraries of a CUDA build of torch. OUT gets
``libfakegpu.so`` and a symbolic link to it for each library of NVIDIA's that torch loads. Standard
library only; needs ``cc``, ``nm`` and ``readelf``. What is up to date is left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fakegpu import stubs

HERE = Path(__file__).resolve().parent
LIBRARY = "libfakegpu.so"
_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-pthread"]
_WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-misleading-indentation"]


def build(include: Path, torch_libraries: Path, out: Path) -> None:
    """Compile what has changed, link, and place the links."""
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted([*HERE.glob("*.c"), *HERE.glob("nccl/*.c")])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, include, out), sources))
    needs = _needs(torch_libraries, out)
    library = out / LIBRARY
    inputs = [*objects, Path(stubs.__file__), Path(__file__)]
    if _older(library, inputs):
        assembly = out / "stubs.S"
        assembly.write_text(stubs.assembly(needs.functions - stubs.defined_in(objects)))
        draft = out / f"{LIBRARY}.{os.getpid()}"
        link: list[str | Path] = [
            "cc",
            "-shared",
            f"-Wl,-soname,{LIBRARY}",
            "-Wl,-z,defs",
            "-pthread",
            "-o",
            draft,
        ]
        subprocess.run([*link, *objects, assembly, "-lm", "-ldl"], check=True)
        draft.replace(library)  # a process that has loaded the old one keeps it
    for name in needs.libraries:
        if not (out / name).is_symlink():
            (out / name).symlink_to(LIBRARY)


def _compile(source: Path, include: Path, out: Path) -> Path:
    name = "-".join(source.relative_to(HERE).with_suffix(".o").parts)
    target = out / name
    headers = [*HERE.glob("*.h"), *HERE.glob("nccl/*.h"), Path(__file__)]
    if _older(target, [source, *headers]):
        places: list[str | Path] = ["-isystem", include, "-I", HERE]
        command: list[str | Path] = ["cc", *_FLAGS, *_WARNINGS, *places, "-c", source, "-o", target]
        subprocess.run(command, check=True)
    return target


def _needs(torch_libraries: Path, out: Path) -> stubs.Needs:
    """What torch needs; read once for each torch, since it takes seconds."""
    memory = out / "needs.json"
    if not _older(memory, [torch_libraries / "libtorch_cuda.so", Path(stubs.__file__)]):
        found = json.loads(memory.read_text())
        return stubs.Needs(frozenset(found["functions"]), tuple(found["libraries"]))
    needs = stubs.needs_of(torch_libraries)
    memory.write_text(
        json.dumps({"functions": sorted(needs.functions), "libraries": needs.libraries})
    )
    return needs


def _older(target: Path, inputs: list[Path]) -> bool:
    if not target.exists():
        return True
    made = target.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > made for path in inputs)


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:]))
