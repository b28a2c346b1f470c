"""The symbols that torch needs of NVIDIA, and stubs for those that we do not simulate."""

from __future__ import annotations

import mmap
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# How names of NVIDIA's libraries begin.
_NVIDIA = re.compile(
    r"(__)?(cu[A-Z]|cuda[A-Z]|cublas|cudnn|cufft|cufile|curand|cusparse|cusolver|cupti|nccl"
    r"|nvrtc|nvshmem|nvml|nvJit)"
)
_LIBRARIES_OF_NVIDIA = re.compile(
    r"lib(cu(blas|da|dnn|fft|file|pti|rand|solver|sparse)|nccl|nv(JitLink|rtc|shmem|idia|perf|toolsExt))"
)
# What is opened by name and so stands in no list of needed libraries.
_OPENED_BY_NAME = ("libnvidia-ml.so.1", "libcuda.so.1")


@dataclass(frozen=True)
class Needs:
    """What torch's libraries need from outside: names of functions, and of libraries."""

    functions: frozenset[str]
    libraries: tuple[str, ...]


def needs_of(torch_libraries: Path, headers: Path) -> Needs:
    """Read from all libraries of the directory: what they are linked with, and what they look up.

    Functions that are looked up stand among their strings; ``headers`` say which strings are such.
    """
    files = [path for path in torch_libraries.glob("lib*.so*") if path.is_file()]
    wanted: set[str] = set()
    given: set[str] = set()
    needed: set[str] = set()
    for path in files:
        for line in _output("nm", "--dynamic", path).splitlines():
            *_, kind, name = line.split()
            if kind not in "wv":  # weak: may be missing
                (wanted if kind == "U" else given).add(name.split("@")[0])
        needed.update(re.findall(r"\(NEEDED\).*\[(.*?)\]", _output("readelf", "--dynamic", path)))
    own = {path.name for path in files}
    libraries = {name for name in needed - own if _LIBRARIES_OF_NVIDIA.match(name)}
    functions = {name for name in wanted - given if _NVIDIA.match(name)}
    functions |= _strings(files) & _declared(headers)
    return Needs(frozenset(functions), tuple(sorted(libraries | set(_OPENED_BY_NAME))))


def _declared(headers: Path) -> set[str]:
    """The functions of the driver and of NVML, which programs look up by name."""
    text = "".join((headers / name).read_text() for name in ("cuda.h", "nvml.h"))
    return set(re.findall(r"\b(?:CUDAAPI|DECLDIR) (\w+) *\(", text))


def _strings(files: list[Path]) -> set[str]:
    """Strings of the libraries that may name a function of the driver or of NVML."""
    found: set[str] = set()
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            names = re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])\w+)(?=\0)", content)
            found.update(name.decode() for name in names)
    return found


def defined_in(objects: list[Path]) -> frozenset[str]:
    """The functions that compiled files define."""
    lines = _output("nm", "--extern-only", "--defined-only", *objects).splitlines()
    return frozenset(line.split()[-1] for line in lines if len(line.split()) == 3)


def assembly(functions: frozenset[str]) -> str:
    """A stub for each: it calls ``stub_called`` (symbols.c) with its ``struct point``."""
    code, points, names = [".text"], [".data", ".balign 8"], [".section .rodata"]
    for number, name in enumerate(sorted(functions)):
        code += [
            f".globl {name}",
            f".type {name}, @function",
            f"{name}: lea .Lpoint{number}(%rip), %rdi",
            "jmp stub_called",
        ]
        points.append(f".Lpoint{number}: .quad .Lname{number}, 0")
        names.append(f'.Lname{number}: .string "{name}"')
    return "\n".join([*code, *points, *names, '.section .note.GNU-stack, "", @progbits', ""])


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
