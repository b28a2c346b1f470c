"""The stack line: the versions installed on this node, found without importing torch."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ncclops.host.gpus import Gpus
from ncclops.host.software import installed_torch, nccl_version, package_version, torch_constants

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
    torch = torch_constants()
    return Stack(
        torch=torch.get("__version__") or installed_torch(),
        triton=package_version("triton"),
        flash_attn=package_version("flash-attn"),
        nccl=nccl_version(),
        cuda=torch.get("cuda"),
        driver=gpus.driver,
        gpu=_gpu_summary(gpus),
        python=platform.python_version(),
        commit=_git_commit(script_dir),
    )


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
