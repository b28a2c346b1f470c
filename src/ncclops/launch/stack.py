"""The stack line: the versions installed on this node, found without importing torch."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import platform
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from ncclops.env import installed_nccl, installed_torch
from ncclops.host.gpus import Gpus

_MISSING = "-"
_SHOWN_AS = {
    "flash_attn": "flash-attn",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "gpu": "GPU",
    "python": "Python",
}
# Long enough for a cold network file system, short enough not to hold up a start.
_GIT_LIMIT_S = 3


@dataclass(frozen=True)
class Stack:
    """Versions as strings; ``None`` where a part is not there."""

    torch: str | None
    triton: str | None
    flash_attn: str | None
    nccl: str | None
    cuda: str | None
    driver: str | None
    gpu: str | None
    python: str
    commit: str | None

    def line(self) -> str:
        """All parts on one line; a missing one reads ``-``."""
        return " | ".join(
            f"{_SHOWN_AS.get(name, name)} {value or _MISSING}"
            for name, value in asdict(self).items()
        )


def find_stack(gpus: Gpus, script_dir: Path) -> Stack:
    """The versions installed here, and the git commit that ``script_dir`` is at."""
    torch_version = _torch_version_module()
    return Stack(
        torch=torch_version.get("__version__") or installed_torch(),
        triton=package_version("triton"),
        flash_attn=package_version("flash-attn"),
        nccl=_nccl_version(),
        cuda=torch_version.get("cuda"),
        driver=gpus.driver,
        gpu=_gpu_summary(gpus),
        python=platform.python_version(),
        commit=_git_commit(script_dir),
    )


def package_version(package: str) -> str | None:
    """The installed version of a distribution, read from its metadata."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _torch_version_module() -> dict[str, str]:
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


def _nccl_version() -> str | None:
    if version := installed_nccl():
        return version
    # A build against the system's NCCL: ask the library that the loader would find.
    with suppress(OSError, AttributeError):
        code = ctypes.c_int()
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code)) == 0:
            major, minor, patch = code.value // 10000, code.value // 100 % 100, code.value % 100
            return f"{major}.{minor}.{patch}"
    return None


def _gpu_summary(gpus: Gpus) -> str | None:
    counted = Counter(gpus.names)
    return ", ".join(f"{count} × {name}" for name, count in counted.items()) or None


def _git_commit(directory: Path) -> str | None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_S,
        )

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        if commit.returncode != 0:
            return None
        changed = git("diff", "--quiet", "HEAD").returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+changes" if changed else "")
