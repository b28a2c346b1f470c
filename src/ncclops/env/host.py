"""What the environment plan needs to know about this host: directories, interfaces, HCAs.

GPUs are counted in ``ncclops.host.gpus``, versions found in ``ncclops.host.software``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ncclops.env.lint.model import Host


def files_in(directory: str) -> frozenset[str]:
    """The names of what is in ``directory``; none where it cannot be read."""
    try:
        return frozenset(path.name for path in Path(directory).iterdir())
    except OSError:
        return frozenset()


def describe_host(environ: Mapping[str, str], root: Path = Path("/")) -> Host:
    """What lint needs to know about this host: interfaces, HCAs, network plugins."""
    devices = root / "sys/class/infiniband"
    layers = [_text(path) for path in devices.glob("*/ports/*/link_layer")]
    return Host(
        interfaces=frozenset(path.name for path in (root / "sys/class/net").glob("*")),
        hcas=frozenset(path.name for path in devices.glob("*")),
        infiniband=bool(layers) and all(layer == "InfiniBand" for layer in layers),
        net_plugins=frozenset(
            str(path)
            for directory in _library_directories(environ, root)
            for path in directory.glob("libnccl-net*.so*")
        ),
    )


def _library_directories(environ: Mapping[str, str], root: Path) -> list[Path]:
    named = [Path(entry) for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    plugin = Path(environ.get("NCCL_NET_PLUGIN", ""))
    if plugin.is_absolute():
        named.append(plugin.parent)
    usual = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/local/lib", "lib64")
    return [*named, *(root / directory for directory in usual)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
