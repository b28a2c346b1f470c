"""What torch keeps for the whole process and computes by: its default type, precisions, ...

Setting one changes results without a word. ``restart._torch_state`` has torch's modes, which end
with a block of code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ncclops.restart.log import logged

_PUBLIC = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.allow_tf32",
    "utils.deterministic.fill_uninitialized_memory",
    # From torch 2.9 on, after what sets these as well. Once one is set, the older ones cannot be
    # read.
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")  # which kernels may be taken


class _Setting(NamedTuple):
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def read() -> dict[str, Any]:
    """All settings by name, but for those that this torch does not have."""
    found = {}
    for setting in _settings():
        with suppress(AttributeError, RuntimeError):
            found[setting.name] = setting.get()
    return found


def write(settings: Mapping[str, Any]) -> None:
    """Set what is not as in ``settings``."""
    for setting in _settings():
        if setting.name in settings:
            with logged(f"restoring torch's {setting.name}"), suppress(AttributeError):
                _write(setting, settings[setting.name])


def _write(setting: _Setting, value: Any) -> None:
    try:
        is_set = setting.get() == value
    except RuntimeError:
        return  # of the older precisions; the newer ones follow
    if not is_set:
        setting.set(value)


@cache
def _settings() -> tuple[_Setting, ...]:
    return tuple(_all_settings())


def _all_settings() -> Iterator[_Setting]:
    yield _Setting("default type", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting("default device", _default_device, torch.set_default_device)
    yield _Setting("number of threads", torch.get_num_threads, torch.set_num_threads)
    yield _Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    )
    yield _Setting(
        "precision of products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
    for kind in _ATTENTION:
        with suppress(AttributeError):
            yield _Setting(
                f"{kind} attention",
                getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
                getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
            )
    for path in _PUBLIC:
        yield _Setting(path, partial(attrgetter(path), torch), partial(_set_attribute, path))


def _set_attribute(path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(torch), name, value)


def _default_device() -> torch.device | None:
    """``None``: the script has set none."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device
