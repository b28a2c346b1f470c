"""What the driver says of the GPUs of this node's ranks while an attempt runs.

Xid errors are reported as they come. When a rank fails, its GPU is looked at: if that is the cause,
the GPU and its node are to be replaced (``GpuFault``). Where NVML cannot be used, what the rank has
written is all there is.

In threads: a call into the driver of a sick GPU may take for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ncclops.agent.in_thread import in_thread
from ncclops.agent.job import Job
from ncclops.classify import Scanner, in_place
from ncclops.classify.loader import standing_signatures
from ncclops.host import nvml
from ncclops.host.nvml import GpuName
from ncclops.record.event_values import GpuFault
from ncclops.record.tail import last_lines

# As a source of the classifier's evidence.
DRIVER = "driver"
_HARDWARE = ("gpu-hardware", "replace-node")
# An event ends the wait; without one it looks whether the attempt has ended.
_WAIT = timedelta(seconds=1)
_START_WITHIN = timedelta(seconds=5)
_JUDGE_WITHIN = timedelta(seconds=10)
_LINES = 150
# Above this in a traceback may be another rank's, which a rank that leaves shows as the cause.
_REMOTE = "RemoteFaultError"
_CONSEQUENCE = "The above exception was the direct cause of the following exception"
# The most frequent of NVIDIA's Xid catalogue.
_XIDS = {
    13: "a kernel failed on the GPU",
    31: "a kernel accessed memory it must not",
    43: "a kernel of the process failed",
    45: "the driver ended the channels of a process",
    48: "double-bit ECC error",
    63: "a memory row is to be remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}


@dataclass(frozen=True)
class Fact:
    """Something the driver says of a GPU: ``line`` for the classifier, ``words`` for people."""

    line: str
    words: str


@dataclass
class _Gpu:
    """The GPU of a rank. ``ecc`` counts uncorrected errors, as at the start."""

    selector: int | str
    name: GpuName
    handle: int | None = None
    ecc: int | None = None
    xids: list[int] = field(default_factory=list)


class GpuWatch:
    """Watches the GPUs of ``ranks`` from :meth:`start` to :meth:`close`.

    In the event loop ``on_xid`` gets each Xid error, with the rank whose GPU it is of, and
    ``on_fault`` each GPU that made its rank fail.
    """

    def __init__(
        self,
        job: Job,
        ranks: Iterable[int],
        on_xid: Callable[[int, GpuName, int, str], None],
        on_fault: Callable[[GpuFault], None],
    ) -> None:
        self._job, self._on_xid, self._on_fault = job, on_xid, on_fault
        selectors = {rank: job.device_of(rank) for rank in ranks}
        self._gpus = {
            rank: _Gpu(selector, GpuName.of_selector(selector))
            for rank, selector in selectors.items()
            if selector is not None
        }
        self._loop = asyncio.get_running_loop()
        self._known = threading.Event()  # what the GPUs are called
        self._ending = threading.Event()
        self._judging: dict[int, threading.Thread] = {}
        self._facts: dict[int, list[Fact]] = {}

    def start(self) -> None:
        """Begin to wait for Xid errors, where ranks have GPUs."""
        if self._gpus:
            threading.Thread(target=self._watch, name="ncclops-gpus", daemon=True).start()

    def judge(self, rank: int) -> None:
        """``rank`` has failed: find out whether its GPU is the cause."""
        before = self._judging.get(rank)  # of an earlier process of the rank
        if rank in self._gpus and (before is None or not before.is_alive()):
            thread = threading.Thread(
                target=self._judge, args=(rank,), name=f"ncclops-gpu-{rank}", daemon=True
            )
            self._judging[rank] = thread
            thread.start()

    async def judged(self, rank: int) -> None:
        """Until that is found out, and reported. A driver that does not answer is not waited for
        longer than ``_JUDGE_WITHIN``."""
        if (thread := self._judging.get(rank)) is not None:
            with suppress(TimeoutError):
                await in_thread(thread.join, _JUDGE_WITHIN.total_seconds())

    def close(self) -> Mapping[int, Sequence[str]]:
        """Stop. Lines about the GPUs of the ranks that were judged; blocks until that is done."""
        deadline = time.monotonic() + _JUDGE_WITHIN.total_seconds()
        for thread in self._judging.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ending.set()
        return {rank: [fact.line for fact in facts] for rank, facts in self._facts.items()}

    # --- the thread that waits for Xid errors ---------------------------------------------------

    def _watch(self) -> None:
        with nvml.session() as found:
            if isinstance(found, nvml.Unavailable):
                self._known.set()
                return
            events = _no_loss(found.query, "nvmlEventSetCreate")
            for gpu in self._gpus.values():
                self._look_up(found, gpu, events)
            self._known.set()
            while events is not None and not self._ending.is_set():
                self._wait(found, events)

    def _look_up(self, found: nvml.Nvml, gpu: _Gpu, events: Any) -> None:
        with suppress(nvml.GpuLostError):
            device = found.device(gpu.selector)
            if isinstance(device, nvml.Unavailable):
                return
            gpu.name, gpu.ecc = device.name, device.ecc_errors(corrected=False)
            gpu.handle = _address(device.handle)
            if events is not None:
                kinds = found.bindings.nvmlEventTypeXidCriticalError
                device.query("nvmlDeviceRegisterEvents", kinds, events)

    def _wait(self, found: nvml.Nvml, events: Any) -> None:
        began, pause = time.monotonic(), _WAIT.total_seconds()
        event = _no_loss(found.query, "nvmlEventSetWait_v2", events, int(1000 * pause))
        if event is None:
            # At once, where it is an error and not the end of the wait.
            self._ending.wait(max(0.0, began + pause - time.monotonic()))
            return
        for rank, gpu in self._gpus.items():
            if gpu.handle == _address(event.device):
                number = int(event.eventData)
                gpu.xids.append(number)
                self._call(self._on_xid, rank, gpu.name, number, describe_xid(number))

    # --- the thread of each rank that has failed ------------------------------------------------

    def _judge(self, rank: int) -> None:
        self._known.wait(_START_WITHIN.total_seconds())
        gpu, run = self._gpus[rank], self._job.run
        facts = [_xid_fact(gpu.name, number) for number in gpu.xids] + _read(gpu)
        self._facts[rank] = facts
        said = "\n".join(last_lines(run.paths.rank(rank).stderr_log, _LINES))
        fault = find_fault(rank, run.node, gpu.name, facts, said)
        if fault is not None:
            self._call(self._on_fault, fault)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(function, *arguments)


def find_fault(
    rank: int, node: str, name: GpuName, facts: Sequence[Fact], said: str
) -> GpuFault | None:
    """Whether the GPU made ``rank`` fail, by the driver's ``facts`` and what the rank ``said``."""
    if _REMOTE in said:
        said = said.rpartition(_CONSEQUENCE)[2]
    scanner = Scanner()
    scanner.feed(rank, DRIVER, "".join(f"{fact.line}\n" for fact in facts))
    scanner.feed(rank, "output", f"{said}\n")
    verdict = scanner.verdict().verdict
    # Whatever speaks against another attempt, such as an exception that the job got over before.
    signature = standing_signatures().by_id.get(verdict.signature or "")
    if signature is None or (signature.class_, signature.retry) != _HARDWARE:
        return None
    error = in_place.corrupted_context(said)
    own = [] if error is None or not in_place.is_hardware(error) else [error]
    what = ", ".join(dict.fromkeys([*own, *(fact.words for fact in facts)])) or verdict.summary
    return GpuFault(
        rank=rank,
        node=node,
        gpu=name.index,
        uuid=name.uuid,
        pci=name.pci,
        device=str(name),
        what=what,
    )


def describe_xid(number: int) -> str:
    """Such as ``Xid 79 (GPU has fallen off the bus)``."""
    return f"Xid {number} ({_XIDS[number]})" if number in _XIDS else f"Xid {number}"


def _xid_fact(name: GpuName, number: int) -> Fact:
    # As in the kernel's log, without the function of the PCI address.
    address = "" if name.pci is None else name.pci.rpartition(".")[0]
    return Fact(
        f"NVRM: Xid (PCI:{address}): {number}, {_XIDS.get(number, '')}", describe_xid(number)
    )


def _read(gpu: _Gpu) -> list[Fact]:
    """What NVML says of the GPU now that speaks against it."""
    found: list[str] = []
    with nvml.session() as nvml_:
        try:
            device = nvml_ if isinstance(nvml_, nvml.Unavailable) else nvml_.device(gpu.selector)
            if isinstance(device, nvml.Unavailable):
                return []
            errors = device.ecc_errors(corrected=False)
            if errors is not None and gpu.ecc is not None and errors > gpu.ecc:
                found.append(f"{errors - gpu.ecc} uncorrectable ECC errors")
            if (need := device.recovery().need) is not None:
                found.append(need)
        except nvml.GpuLostError as lost:
            found.append(str(lost))
    return [Fact(words, words) for words in found]


def _no_loss(query: Callable[..., Any], *arguments: Any) -> Any:
    """What the query answers; None also where a GPU is lost."""
    with suppress(nvml.GpuLostError):
        return query(*arguments)
    return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
