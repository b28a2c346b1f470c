"""What ranks run in tests of the device: the real torch on a fake GPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from ncclops.host.nvml import Nvml, session
from ncclops.testing import note


def properties() -> list[tuple[str, int]]:
    return [
        (torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory)
        for i in range(torch.cuda.device_count())
    ]


def uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


# --- what kernels compute -------------------------------------------------------------------------

COMPUTATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "fill": lambda x, y: torch.full_like(x, 2.5),
    "fill in place": lambda x, y: x.clone().fill_(-1),
    "add": lambda x, y: x + y,
    "add with a factor": lambda x, y: x.sub(y, alpha=3),
    "add to a scalar": lambda x, y: 1 - x,
    "multiply": lambda x, y: x * y,
    "multiply in place": lambda x, y: x.clone().mul_(0.5),
    "divide": lambda x, y: x / y,
    "equal": lambda x, y: x == x.clone(),
    "unequal": lambda x, y: x != y,
    "compare": lambda x, y: x > y,
    "compare to a scalar": lambda x, y: x <= 4.5,
    "not a number": lambda x, y: (x / 0).isnan(),
    "to double": lambda x, y: y.double(),
    "to half": lambda x, y: y.half(),
    "to bfloat16": lambda x, y: y.bfloat16(),
    "from bfloat16": lambda x, y: y.bfloat16().float(),
    "to integers": lambda x, y: x.long(),
    "halves": lambda x, y: y.bfloat16() + x.bfloat16(),
    "integers": lambda x, y: x.int() * 7 - y.int(),
    "transposed": lambda x, y: x.t().contiguous(),
    "broadcast": lambda x, y: x + y[0],
    "sum": lambda x, y: y.sum(),
    "sum of columns": lambda x, y: y.sum(0),
    "sum of rows": lambda x, y: y.sum(1),
    "sum of integers": lambda x, y: x.long().sum(),
    "sum of doubles": lambda x, y: y.double().sum(),
    "sum of halves": lambda x, y: x.half().sum(),
    "mean": lambda x, y: y.mean(),
    "norm": lambda x, y: y.norm(),
    "maximum": lambda x, y: y.max(),
    "minimum": lambda x, y: y.min(),
    "maximum of integers": lambda x, y: x.int().max(),
    "all": lambda x, y: (x == x.clone()).all(),
    "any": lambda x, y: (x == 3).any(),
}


def differences() -> list[str]:
    """The computations whose result on the GPU is another than that of the CPU."""
    torch.manual_seed(1)
    x, y = torch.arange(24.0).view(4, 6) - 3, torch.randn(4, 6)
    wrong = []
    for name, compute in COMPUTATIONS.items():
        expected, found = compute(x, y), compute(x.cuda(), y.cuda()).cpu()
        if found.dtype != expected.dtype or not torch.allclose(found, expected):
            wrong.append(f"{name}: {found} instead of {expected}")
    return wrong


def equality() -> tuple[bool, bool]:
    x = torch.arange(1000.0).cuda()
    y = x.clone()
    y[-1:].fill_(1)
    return torch.equal(x, x.clone()), torch.equal(x, y)


def sine() -> str:
    """What becomes of a kernel that is not simulated."""
    try:
        torch.zeros(3, device="cuda").sin()
        return "nothing"
    except RuntimeError as error:
        return str(error).splitlines()[0]


# --- streams, events ------------------------------------------------------------------------------


def wait_across_streams() -> tuple[list[bool], float]:
    """A fill that a rule holds up on one stream, and a copy that waits for it on another one."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    # ones: zeros take no kernel from torch 2.15 on
    source, target = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    note("ready")
    filled = torch.cuda.Event()
    with torch.cuda.stream(first):
        source.fill_(7)
        filled.record()
    with torch.cuda.stream(second):
        second.wait_event(filled)
        target.copy_(source)
    done = [first.query(), second.query(), filled.query()]
    note("queued")
    torch.cuda.synchronize()
    return [*done, first.query(), second.query(), filled.query()], target.cpu()[0].item()


def times() -> float:
    """Seconds between two events, with a kernel in between."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(4, device="cuda")
    start.record()
    x.fill_(2)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_function() -> tuple[list[str], list[str]]:
    """A function of the host in a stream, behind a fill that a rule holds up."""
    x = torch.ones(4, device="cuda")
    seen: list[str] = []

    def called(_: int) -> None:
        seen.append(str(x.data_ptr() and ctypes.c_float.from_address(x.data_ptr()).value))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called)
    x.fill_(3)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert cuda("cudaLaunchHostFunc", stream, function, None) == 0
    before = list(seen)
    note("queued")
    torch.cuda.synchronize()
    return before, seen


# --- memory ---------------------------------------------------------------------------------------


def allocations() -> dict[str, Any]:
    """An allocation that fits, one that does not, and what is free before, during and after."""
    free = [torch.cuda.mem_get_info()[0]]
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    x[:: 1 << 20] = 1
    free.append(torch.cuda.mem_get_info()[0])
    try:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        error = "none"
    except torch.cuda.OutOfMemoryError as out_of_memory:
        error = str(out_of_memory)
    del x
    torch.cuda.empty_cache()
    free.append(torch.cuda.mem_get_info()[0])
    expandable = [s["is_expandable"] for s in torch.cuda.memory_snapshot()]
    x = torch.full((1000,), 4.0, device="cuda")
    expandable += [s["is_expandable"] for s in torch.cuda.memory_snapshot()]
    return {"free": free, "error": error, "expandable": expandable, "sum": x.sum().item()}


def use_after_free() -> list[str]:
    """A copy into memory that has been freed, and what comes after it."""
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    address = ctypes.c_void_p()
    assert cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(4096)) == 0
    assert cuda("cudaFree", address) == 0
    errors = [str(cuda("cudaMemset", address, 0, ctypes.c_size_t(4096)))]
    for attempt in (lambda: x + 1, torch.cuda.synchronize, x.cpu):
        try:
            attempt()
            errors.append("none")
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
    return errors


def use_beyond_end() -> int:
    """A copy that runs over the end of an allocation."""
    address = ctypes.c_void_p()
    assert cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(4096)) == 0
    return cuda("cudaMemset", address, 0, ctypes.c_size_t(4097))


# --- faults ---------------------------------------------------------------------------------------


def fills(count: int) -> list[str]:
    """What becomes of each of ``count`` fills, waited for one by one."""
    x = torch.empty(4, device="cuda")
    results = []
    for _ in range(count):
        try:
            x.fill_(1)
            torch.cuda.synchronize()
            results.append("done")
        except RuntimeError as error:
            results.append(str(error).splitlines()[0])
    return results


def allocation_attempts() -> list[str]:
    results = []
    for _ in range(3):
        try:
            x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            del x
            torch.cuda.empty_cache()
            results.append("done")
        except torch.cuda.OutOfMemoryError:
            results.append("out of memory")
    return results


def fill_and_wait() -> float:
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    note("ready")
    x.fill_(5)
    note("queued")
    torch.cuda.synchronize()
    return x.cpu()[0].item()


def in_a_fork() -> int:
    """The error of CUDA in a child of a process that has used the device."""
    torch.zeros(4, device="cuda")
    if (child := os.fork()) == 0:
        os._exit(cuda("cudaDeviceSynchronize"))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def first_call() -> None:
    torch.zeros(1, device="cuda")


def watch_gpu() -> None:
    with session() as nvml:
        assert isinstance(nvml, Nvml)
        nvml.query("nvmlDeviceGetHandleByIndex", 0)


def cuda(function: str, *arguments: Any) -> int:
    """The result of a function of the runtime."""
    result: int = getattr(ctypes.CDLL("libcudart.so.13"), function)(*arguments)
    return result
