"""The GPUs of this node, as NVML knows them. Nothing here needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a worker started here could use; ``driver`` is None where there is none."""

    names: tuple[str, ...] = ()
    driver: str | None = None

    @property
    def count(self) -> int:
        return len(self.names)


def find_gpus(environ: Mapping[str, str] = os.environ) -> Gpus:
    """GPUs that NVML knows and ``CUDA_VISIBLE_DEVICES`` leaves visible.

    No driver, no NVML and no GPU are all the same answer: an empty ``Gpus``.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Gpus()
    try:
        names = [
            _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return Gpus()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return Gpus(_visible(names, environ.get("CUDA_VISIBLE_DEVICES")), driver)


def _visible(names: list[str], setting: str | None) -> tuple[str, ...]:
    """``names`` after CUDA's rule: listed entries in their order, up to the first invalid one."""
    if setting is None:
        return tuple(names)
    visible = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal() and int(entry) < len(names):
            visible.append(names[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            visible.append(names[0] if names else entry)  # nodes carry GPUs of one kind
        else:
            break
    return tuple(visible)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
