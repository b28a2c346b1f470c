"""Which variables the libraries installed here read, by their own strings.

A name that a library passes to ``getenv`` stands in its file as text that ends with a zero
byte. That is what is looked for; a name in the middle of a message does not count. Python
sources are searched for quoted names.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ncclops.env.catalogue import LIBNCCL, TORCH, Variable, catalogue, is_covered
from ncclops.errors import UsageError
from ncclops.record.regular_file import open_regular
from ncclops.versions import release

_NCCL_NAME = re.compile(rb"NCCL_[A-Z0-9_]+")
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_TORCH_LIBRARIES = ("libc10*.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so")
_TORCH_SOURCES = ("distributed", "_inductor", "_logging", "cuda", "monitor", "utils")
_PREFIXES = (b"NCCL_", b"TORCH", b"GLOO_", b"PYTORCH_", b"KINETO_", b"OMP_")
_QUOTED = re.compile(r"""["']((?:TORCH|NCCL|GLOO|PYTORCH|DCP|KINETO)[A-Z0-9]*_[A-Z0-9_]+)["']""")


@dataclass(frozen=True)
class Library:
    """A library (or torch's whole installation) and the names found in it.

    ``unknown`` are read and not in the catalogue; ``claimed`` are in the catalogue as read by
    this version of it, and are not there.
    """

    name: str
    version: str | None
    path: str
    read: frozenset[str]
    unknown: frozenset[str]
    claimed: frozenset[str]


@dataclass(frozen=True)
class Audit:
    """What is installed against the catalogue and an environment."""

    libraries: tuple[Library, ...]
    set_but_unread: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.env-audit/1``."""
        libraries = [
            {
                **asdict(library),
                "read": sorted(library.read),
                "unknown": sorted(library.unknown),
                "claimed": sorted(library.claimed),
            }
            for library in self.libraries
        ]
        return {
            "schema": "ncclops.env-audit/1",
            "libraries": libraries,
            "set_but_unread": list(self.set_but_unread),
        }


def audit(environ: Mapping[str, str], *, nccl: Path | None = None) -> Audit:
    """Audit what is installed, or the libnccl at ``nccl`` in place of the installed one.

    ``set_but_unread`` are variables of ``environ`` that belong to NCCL or torch by their name
    or by the catalogue, and that none of the libraries found here reads.
    """
    libraries = []
    path = nccl or find_libnccl()
    if path is not None:
        libraries.append(audit_nccl(path))
    torch = audit_torch()
    if torch is not None:
        libraries.append(torch)
    return Audit(tuple(libraries), _unread(environ, libraries))


def find_libnccl() -> Path | None:
    """The libnccl that torch's wheels bring, None without one."""
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("nccl/lib/libnccl.so*")):
            return path
    return None


def audit_nccl(path: Path) -> Library:
    """The names in a libnccl. Raises ``UsageError`` when it cannot be read, or is none."""
    literals, version = _scan_nccl(path)
    if version is None and not literals:
        raise UsageError(f"{path} is no libnccl: neither its version nor a variable is in it")
    known = catalogue()
    read = frozenset(name for name in literals if name in known)
    unknown = literals - read - constants()
    claimed = frozenset(
        name
        for name, variable in known.items()
        if variable.component in LIBNCCL
        and name.startswith("NCCL_")
        and name not in literals
        and _claims(variable, version)
    )
    return Library("libnccl", version, str(path), read, frozenset(unknown), claimed)


def _claims(variable: Variable, version: str | None) -> bool:
    """Whether the catalogue says that this NCCL reads it, by the binaries it was found in."""
    if variable.status in ("removed", "unread"):
        return False
    if variable.libnccl is None:
        return variable.read_in(torch=None, nccl=version) is not False
    first, last = variable.libnccl
    return version is None or release(first) <= release(version) <= release(last)


def _scan_nccl(path: Path) -> tuple[frozenset[str], str | None]:
    data = _map(path)
    with data:
        names = frozenset(
            match[0].decode("ascii")
            for match in _NCCL_NAME.finditer(data)
            if data[match.end() : match.end() + 1] == b"\0" and _starts_a_name(data, match.start())
        )
        version = _NCCL_VERSION.search(data)
        return names, version[1].decode("ascii") if version else None


def _starts_a_name(data: mmap.mmap, start: int) -> bool:
    """Whether the text at ``start`` is no part of a longer name (linkers leave no zero before)."""
    before = data[start - 1 : start]
    return not (before == b"_" or before.isupper())


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is empty"
        raise UsageError(f"{path}: cannot be read: {reason}") from None


@cache
def constants() -> frozenset[str]:
    """Names in libnccl that look like variables and are constants."""
    text = resources.files("ncclops.env").joinpath("data/libnccl_constants.txt").read_text("utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def audit_torch(root: Path | None = None) -> Library | None:
    """The names in the installed torch (never imported), or in the one at ``root``."""
    if root is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        root = Path(spec.origin).parent
    names = _torch_binaries(root) | _torch_sources(root)
    known = catalogue()
    read = frozenset(name for name in names if name in known)
    # Only what belongs to collectives is reported: torch reads hundreds of other names.
    unknown = frozenset(name for name in names - read if is_covered(name) and name != "NCCL_")
    return Library(
        "torch", _torch_version(root), str(root), read, unknown - constants(), frozenset()
    )


def _torch_version(root: Path) -> str | None:
    try:
        text = (root / "version.py").read_text("utf-8")
    except OSError:
        return None
    match = re.search(r"__version__ = '([^']+)'", text)
    return match[1] if match else None


def _torch_binaries(root: Path) -> set[str]:
    names: set[str] = set()
    for pattern in _TORCH_LIBRARIES:
        for path in sorted((root / "lib").glob(pattern)):
            with _map(path) as data:
                for prefix in _PREFIXES:
                    found = re.finditer(rb"\0(" + prefix + rb"[A-Z0-9_]+)(?=\0)", data)
                    names.update(match[1].decode("ascii") for match in found)
    return names


def _torch_sources(root: Path) -> set[str]:
    names: set[str] = set()
    for directory in _TORCH_SOURCES:
        for path in (root / directory).rglob("*.py"):
            names.update(_QUOTED.findall(path.read_text("utf-8", errors="replace")))
    return names


def _unread(environ: Mapping[str, str], libraries: Iterable[Library]) -> tuple[str, ...]:
    found = list(libraries)
    read = frozenset().union(*(library.read | library.unknown for library in found))
    present = {library.name for library in found}
    return tuple(
        name for name in sorted(environ) if name not in read and _should_be_read(name, present)
    )


def _should_be_read(name: str, present: set[str]) -> bool:
    """Whether one of the libraries that were looked into would be the reader of ``name``."""
    variable = catalogue().get(name)
    if variable is None:
        return is_covered(name) and bool(present)
    if variable.status == "unread":
        return True
    if variable.component in LIBNCCL:
        return "libnccl" in present
    # torch's CPU build leaves out what only its CUDA libraries read.
    return variable.component in TORCH and variable.component != "c10d-nccl" and "torch" in present
