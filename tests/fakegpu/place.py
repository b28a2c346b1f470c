"""Where ``scripts/fake_gpu`` puts what it makes, and whether it is there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("cc", "nm", "readelf")


@dataclass(frozen=True)
class Place:
    """The environment with the CUDA build of torch and the fake GPU."""

    root: Path

    @property
    def python(self) -> Path:
        """The interpreter that finds the CUDA build of torch."""
        return self.root / "venv" / "bin" / "python"

    @property
    def torch_libraries(self) -> Path:
        """The libraries of that torch."""
        inside = sysconfig.get_path("purelib", vars={"base": str(self.root / "venv")})
        return Path(inside) / "torch" / "lib"

    @property
    def torch(self) -> tuple[int, ...]:
        """The first two numbers of its version; ``()``: it is not there."""
        file = self.torch_libraries.parent / "version.py"
        if not file.exists():
            return ()
        found = re.search(r"__version__ = '(\d+)\.(\d+)", file.read_text())
        assert found is not None, file
        return tuple(map(int, found.groups()))

    @property
    def has_second_engine(self) -> bool:
        """Whether "nccl" is torch's second engine of NCCL there."""
        return self.torch >= (2, 15) and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"

    @property
    def headers(self) -> Path:
        """NVIDIA's headers."""
        return self.root / "include"

    @property
    def libraries(self) -> Path:
        """The fake GPU, for ``LD_LIBRARY_PATH``."""
        return self.root / "lib"

    def missing(self) -> str | None:
        """Why the fake GPU cannot be used here; None: it can."""
        if platform.machine() != "x86_64":
            return f"the fake GPU's stubs are for x86_64, and this is {platform.machine()}"
        for tool in TOOLS:
            if shutil.which(tool) is None:
                return f"no {tool} to build the fake GPU with"
        if not (self.root / "made").exists():
            return "no environment with the CUDA build of torch: run scripts/fake_gpu"
        return None


_OTHER = os.environ.get("FAKE_GPU_TORCH")
HERE = Place(Path(__file__).resolve().parents[2] / f".fakegpu{f'-{_OTHER}' if _OTHER else ''}")
