"""Versions of what is installed on this node, found without importing torch or starting a GPU.

What cannot be found out is None: absent and unknown are told apart where it matters
(``Software``). Reading takes milliseconds; a fabric manager, where one is installed, is asked for
its version in a process with a deadline.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import platform
import re
import resource
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ncclops.host.gpus import Gpus

# Where NCCL comes from: NVIDIA's wheel, or another build, of which only the version is known.
NcclOrigin = Literal["wheel", "other"]

_FABRIC_MANAGER = Path("usr/bin/nv-fabricmanager")
_FABRIC_MANAGER_LIMIT_S = 3
_LIBRARY_LIMIT = 64 << 20
_USUAL_DIRECTORIES = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/local/lib")
# What the network plugins are known by: text in the library itself, or its path. The group, where
# there is one, is the version. aws-ofi-nccl prints its package string when it starts.
_PLUGINS = (
    ("aws-ofi-nccl", re.compile(rb"Initializing aws-ofi-nccl (\d+(?:\.\d+)+)"), ""),
    ("aws-ofi-nccl", re.compile(rb"aws-ofi-nccl"), ""),
    ("gib", None, "/gib/"),
    ("nccl-rdma-sharp", re.compile(rb"sharp_coll_init"), ""),
)


@dataclass(frozen=True)
class Plugin:
    """A network plugin that NCCL would load: what it is, its version if known, and its library."""

    name: str
    version: str | None
    path: str


@dataclass(frozen=True, kw_only=True)
class Software:
    """What runs a job on this node. None is unknown, except where said.

    ``gpus`` are NVML's names of the GPUs that are visible, none for a node without them.
    ``fabric_manager`` is the installed one's version, ``plugin`` the network plugin that NCCL would
    load; None where there is none, if ``…_known``, and else where that is not known. ``rdma`` are
    the link layers of the InfiniBand and RoCE devices as the kernel has them: ``InfiniBand``,
    ``Ethernet``. ``stack_unlimited``: the limit of a thread's stack (``ulimit -s``) is off.
    """

    torch: str | None = None
    nccl: str | None = None
    nccl_from: NcclOrigin | None = None
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    cpu: str | None = None
    fabric_manager: str | None = None
    fabric_manager_known: bool = False
    plugin: Plugin | None = None
    plugin_known: bool = False
    rdma: tuple[str, ...] | None = None
    stack_unlimited: bool | None = None


def find_software(gpus: Gpus, environ: Mapping[str, str], root: Path = Path("/")) -> Software:
    """What a worker with ``environ`` would run on, on a node with ``gpus``."""
    nccl, origin = nccl_of(environ)
    plugin = find_plugin(environ, root)
    manager = fabric_manager(root)
    return Software(
        torch=torch_version(),
        nccl=nccl,
        nccl_from=origin,
        driver=gpus.driver,
        gpus=gpus.names,
        cpu=platform.machine() or None,
        fabric_manager=manager,
        fabric_manager_known=manager is not None or not (root / _FABRIC_MANAGER).exists(),
        plugin=plugin,
        plugin_known=True,
        rdma=link_layers(root),
        stack_unlimited=resource.getrlimit(resource.RLIMIT_STACK)[0] == resource.RLIM_INFINITY,
    )


def package_version(package: str) -> str | None:
    """The installed version of a distribution, read from its metadata."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def installed_torch() -> str | None:
    """The version of the torch that is installed here, None when there is none."""
    return package_version("torch")


def installed_nccl() -> str | None:
    """The version of NCCL's wheel, as torch's CUDA builds bring it; None without one."""
    wheels = (package_version(f"nvidia-nccl-{cuda}") for cuda in ("cu13", "cu12", "cu11"))
    return next((version for version in wheels if version is not None), None)


def torch_constants() -> dict[str, str]:
    """The string constants of ``torch/version.py``; among them the CUDA torch was built for."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    constants = {}
    with suppress(OSError, SyntaxError):
        for node in ast.parse(Path(spec.origin).with_name("version.py").read_text()).body:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                target, value = node.target, node.value
            else:
                continue
            if (
                isinstance(target, ast.Name)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                constants[target.id] = value.value
    return constants


def torch_version() -> str | None:
    """torch's own word for its version, with its build; else that of its metadata."""
    return torch_constants().get("__version__") or installed_torch()


def nccl_version() -> str | None:
    """The version of NCCL's wheel; without one, of the library that the loader would find."""
    if version := installed_nccl():
        return version
    with suppress(OSError, AttributeError):
        code = ctypes.c_int()
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code)) == 0:
            major, minor, patch = code.value // 10000, code.value // 100 % 100, code.value % 100
            return f"{major}.{minor}.{patch}"
    return None


def nccl_of(environ: Mapping[str, str]) -> tuple[str | None, NcclOrigin | None]:
    """The NCCL that a worker with ``environ`` loads: its version, and where it comes from.

    Both None where the loader may take another one than the wheel's, of a version that its file's
    name does not say.
    """
    preloaded = [
        Path(entry)
        for entry in re.split(r"[:\s]+", environ.get("LD_PRELOAD", ""))
        if Path(entry).name.startswith("libnccl.so")
    ]
    on_path = [
        Path(directory, "libnccl.so.2")
        for directory in environ.get("LD_LIBRARY_PATH", "").split(":")
        if directory and Path(directory, "libnccl.so.2").exists()
    ]
    wheel = installed_nccl()
    if preloaded:
        version = _named_version(preloaded[0])
        return version, None if version is None else "other"
    if on_path:
        # Which one torch takes depends on how its library names its search path.
        version = _named_version(on_path[0])
        if version is None or (wheel is not None and version != wheel):
            return None, None
        return version, "wheel" if version == wheel else "other"
    if wheel is not None:
        return wheel, "wheel"
    version = nccl_version()
    return version, None if version is None else "other"


def _named_version(library: Path) -> str | None:
    with suppress(OSError):
        match = re.fullmatch(r"libnccl\.so\.(\d+\.\d+\.\d+)", library.resolve(strict=True).name)
        return None if match is None else match[1]
    return None


def fabric_manager(root: Path = Path("/")) -> str | None:
    """The version of the fabric manager that is installed here; None without one."""
    program = root / _FABRIC_MANAGER
    if not program.exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [str(program), "--version"],
            capture_output=True,
            text=True,
            timeout=_FABRIC_MANAGER_LIMIT_S,
        )
        match = re.search(r"\d+\.\d+(?:\.\d+)*", done.stdout)
        return None if match is None else match[0]
    return None


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether there is an InfiniBand or RoCE device."""
    devices = root / "sys/class/infiniband"
    with suppress(OSError):
        return any(devices.iterdir())
    return False


def link_layers(root: Path = Path("/")) -> tuple[str, ...]:
    """The link layers of those devices' ports; ``Unspecified`` for EFA."""
    found = set()
    for port in (root / "sys/class/infiniband").glob("*/ports/*/link_layer"):
        with suppress(OSError, UnicodeDecodeError):
            found.add(port.read_text("ascii").strip())
    return tuple(sorted(found))


def find_plugin(environ: Mapping[str, str], root: Path = Path("/")) -> Plugin | None:
    """The network plugin that NCCL would load under ``environ``; None where it would load none.

    ``NCCL_NET_PLUGIN`` is taken as NCCL takes it: a list of file names or of endings of
    ``libnccl-net-….so``; without it ``libnccl-net.so``.
    """
    setting = environ.get("NCCL_NET_PLUGIN", "")
    if setting.strip().lower() == "none":
        return None
    given = [entry.strip() for entry in setting.split(",") if entry.strip()]
    names = [name for entry in given for name in (entry, f"libnccl-net-{entry}.so")]
    for name in names or ["libnccl-net.so"]:
        if name.startswith("/"):
            candidates = [Path(name)]
        else:
            candidates = [directory / name for directory in _directories(environ, root)]
        for library in candidates:
            if library.is_file():
                return _identified(library)
    return None


def _directories(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    yield from (Path(entry) for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    for settings in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        with suppress(OSError, UnicodeDecodeError):
            lines = (line.strip() for line in settings.read_text("utf-8").splitlines())
            yield from (root / line[1:] for line in lines if line.startswith("/"))
    yield from (root / directory for directory in _USUAL_DIRECTORIES)


def _identified(library: Path) -> Plugin:
    content, where = b"", str(library)
    with suppress(OSError):
        where = str(library.resolve())
        if library.stat().st_size <= _LIBRARY_LIMIT:
            content = library.read_bytes()
    for name, pattern, part in _PLUGINS:
        if part and part in where:
            return Plugin(name, None, str(library))
        match = None if pattern is None else pattern.search(content)
        if match is not None:
            version = match[1].decode() if match.re.groups else None
            return Plugin(name, version, str(library))
    return Plugin(library.name, None, str(library))
