"""Builds the fake GPU: ``python -m tests.fakegpu.build``, in the root of the checkout.

``.fakegpu/lib`` gets ``libfakegpu.so`` and a symbolic link to it for each library of NVIDIA's that
torch loads. Needs what ``scripts/fake_gpu`` has put into ``.fakegpu``. Standard library only. What
is up to date is left alone; several may build at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fakegpu import stubs
from tests.fakegpu.place import HERE, Place

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libfakegpu.so"
_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-pthread"]
_WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def build(place: Place) -> None:
    """Compile what has changed, link, and place the links."""
    place.libraries.mkdir(parents=True, exist_ok=True)
    with (place.libraries / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(place)


def _build(place: Place) -> None:
    out = place.libraries
    sources = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("nccl/*.c")])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, place), sources))
    needs = _needs(place)
    library = out / LIBRARY
    inputs = [*objects, out / "needs.json", Path(stubs.__file__), Path(__file__)]
    if _older(library, inputs):
        assembly = out / "stubs.S"
        assembly.write_text(stubs.assembly(needs.functions - stubs.defined_in(objects)))
        draft = out / f"{LIBRARY}.draft"
        _run("cc", "-shared", f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs", "-pthread", "-o", draft,
             *objects, assembly, "-lm", "-ldl")  # fmt: skip
        draft.replace(library)  # a process that has loaded the old one keeps it
    for name in needs.libraries:
        if not (out / name).is_symlink():
            (out / name).symlink_to(LIBRARY)


def _compile(source: Path, place: Place) -> Path:
    name = "-".join(source.relative_to(SOURCES).with_suffix(".o").parts)
    target = place.libraries / name
    headers = [*SOURCES.glob("*.h"), *SOURCES.glob("nccl/*.h"), Path(__file__)]
    if _older(target, [source, *headers]):
        places: list[str | Path] = ["-isystem", place.headers, "-I", SOURCES]
        _run("cc", *_FLAGS, *_WARNINGS, *places, "-c", source, "-o", target)
    return target


def _needs(place: Place) -> stubs.Needs:
    """What torch needs; read once for each torch, since it takes seconds."""
    memory = place.libraries / "needs.json"
    if not _older(memory, [place.root / "made", Path(stubs.__file__)]):
        found = json.loads(memory.read_text())
        return stubs.Needs(frozenset(found["functions"]), tuple(found["libraries"]))
    needs = stubs.needs_of(place.torch_libraries, place.headers)
    memory.write_text(
        json.dumps({"functions": sorted(needs.functions), "libraries": needs.libraries})
    )
    return needs


def _older(target: Path, inputs: list[Path]) -> bool:
    if not target.exists():
        return True
    made = target.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > made for path in inputs)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(HERE)
