"""What was read of one node, as values: what checks look at, and what tests make up.

Paths are relative to the root. A file that is not in ``Files`` was not there; one without a text
was there and could not be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from ncclops.host.software import Software
from ncclops.profiles.model import PreflightNeeds


class Files(msgspec.Struct, frozen=True):
    """Files by path, as ``machine.files.read`` gives them."""

    texts: Mapping[str, str | None] = {}

    def __contains__(self, path: str) -> bool:
        return path in self.texts

    def text(self, path: str) -> str | None:
        """What it holds; None where there is none, or it could not be read."""
        return self.texts.get(path)

    def number(self, path: str) -> int | None:
        """The whole number that it begins with; None where there is none."""
        words = (self.text(path) or "").split()
        try:
            return int(words[0], 0) if words else None
        except ValueError:
            return None

    def names(self, directory: str) -> list[str]:
        """What is directly below ``directory``, sorted with numbers as numbers."""
        prefix = directory.rstrip("/") + "/"
        found = {
            path.removeprefix(prefix).partition("/")[0]
            for path in self.texts
            if path.startswith(prefix)
        }
        return sorted(found, key=_by_numbers)

    def matching(self, pattern: str) -> Iterator[tuple[str, str | None]]:
        """Paths that match the regular expression as a whole, with their texts."""
        compiled = re.compile(pattern)
        return ((path, text) for path, text in self.texts.items() if compiled.fullmatch(path))


class ThrottleSample(msgspec.Struct, frozen=True, kw_only=True):
    """The bits of NVML's clock event reasons at one moment."""

    reasons: int | None = None


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """``nvmlGpuFabricInfo_v2_t``: numbers as in nvml.h; ``cluster`` is a UUID in hex digits."""

    state: int
    status: int
    cluster: str = ""
    clique: int = 0
    health: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML shows it; None is what it does not say. Units as in nvml.h: °C, MHz, mW."""

    index: int
    name: str | None = None
    uuid: str | None = None
    pci: str | None = None
    lost: str | None = None  # NVML's words: it cannot be asked
    error: int | None = None  # its number for that
    ecc_enabled: bool | None = None
    ecc_uncorrected: int | None = None
    sram_uncorrected: int | None = None
    sram_corrected: int | None = None
    dram_corrected: int | None = None
    sram_exceeded: bool | None = None
    rows_uncorrected: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    recovery_action: int | None = None
    throttle: tuple[ThrottleSample, ...] = ()
    temperature_c: int | None = None
    slowdown_c: int | None = None
    memory_temperature_c: int | None = None
    memory_limit_c: int | None = None
    sm_clock_max_mhz: int | None = None
    application_clock_mhz: int | None = None
    default_clock_mhz: int | None = None
    power_limit_mw: int | None = None
    power_default_mw: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: tuple[bool, ...] | None = None
    link_errors: tuple[int, ...] = ()  # replays and recoveries of all links, at each sample
    fabric: Fabric | None = None
    persistence: bool | None = None
    mig: bool | None = None
    processes: tuple[int, ...] | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    missing_file: str | None = None  # its device file, where that is not there


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """NVML as a whole. ``problem``: why it cannot be used, with its error number if it has one."""

    problem: str | None = None
    error: int | None = None
    version: str | None = None
    cuda: int | None = None  # as NVML counts: 13000 for 13.0
    count: int | None = None


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """A file system, as ``statvfs`` shows it. ``files`` and ``files_free``: 0 where not counted.

    ``above``: the directory above ``path`` that was looked at, as ``path`` is not there.
    """

    path: str
    above: str | None = None
    size_bytes: int
    free_bytes: int
    files: int = 0
    files_free: int = 0
    read_only: bool = False
    problem: str | None = None


class Process(msgspec.Struct, frozen=True):
    """One process, by what ``/proc/<pid>/stat`` begins with."""

    pid: int
    name: str
    state: str


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A program in uninterruptible sleep at two looks.

    ``moved``: it has run in between, so it waited twice; None where the kernel does not say.
    ``gpus`` are the device files of GPUs that it has open, ``place`` is where in the kernel it
    waits; empty where that is not to be seen.
    """

    pid: int
    name: str
    moved: bool | None = None
    gpus: tuple[str, ...] = ()
    place: str = ""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The host beside its files.

    ``clock_synchronised`` is the kernel's word; ``stale_shm`` are NCCL's segments that no visible
    process has mapped, ``unseen_processes`` whether there are some that may. ``modules`` are the
    sizes of the memory modules in MiB as the firmware lists them, 0 for an empty place; None: not
    readable.
    """

    files: Files = Files()
    processes: tuple[Process, ...] | None = None
    clock_synchronised: bool | None = None
    shm: Space | None = None
    stale_shm: tuple[str, ...] = ()
    unseen_processes: bool = False
    imex_writable: tuple[bool, ...] = ()
    acs_redirects: tuple[str, ...] | None = None  # bridges; None: not readable
    stuck: tuple[Stuck, ...] = ()
    modules: tuple[int, ...] | None = None


class Name(msgspec.Struct, frozen=True, kw_only=True):
    """The host's name and the addresses that it leads to here; None: not looked up."""

    host: str | None = None
    addresses: tuple[str, ...] | None = None


class LogLine(msgspec.Struct, frozen=True):
    """A line of the kernel log. ``age_s`` before the reading; None where it has no stamp."""

    text: str
    age_s: float | None = None


class KernelLog(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of the kernel log that may matter here; ``source`` None: not readable."""

    source: str | None = None
    lines: tuple[LogLine, ...] = ()


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One RDMA device: its files, and its counters at each sample with the seconds between."""

    device: str
    files: Files = Files()
    samples: tuple[Files, ...] = ()
    window_s: float = 0.0


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """An all_reduce over ``gpus`` of the node: ``seconds`` for ``bytes`` on each, sums ``right``.

    ``problem``: why it failed; ``unknown``: why nothing is known. ``diagnostics`` are the lines of
    NCCL's own, without their prefix.
    """

    gpus: int
    bytes: int = 0
    seconds: float = 0.0
    right: bool = True
    problem: str = ""
    unknown: str = ""
    diagnostics: tuple[str, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read of one node.

    ``late`` holds the parts that did not answer, with how many seconds each was given; a part that
    the reader could not read for another reason is in ``broken``, with why. ``environ`` are the
    variables of the job that checks go by, ``collective`` is there if it was asked for, ``needs``
    is what its lane needs. ``real`` is whether the root is this machine's own; only then
    ``software`` and the CUDA that torch was built for are known.
    """

    time: float = 0.0
    host: Host = Host()
    name: Name = Name()
    log: KernelLog = KernelLog()
    driver: Driver = Driver()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    spaces: tuple[Space, ...] = ()
    late: Mapping[str, float] = {}
    broken: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    needs: PreflightNeeds = PreflightNeeds()
    real: bool = True
    software: Software | None = None
    torch_cuda: str | None = None
    collective: Collective | None = None

    @property
    def files(self) -> Files:
        """The host's files."""
        return self.host.files

    @property
    def nccl(self) -> str | None:
        """The version of NCCL, where it is known."""
        return None if self.software is None else self.software.nccl


def device_file(information: str | None) -> str | None:
    """The device file that the driver's ``information`` about a GPU gives it, without the root."""
    minor = re.search(r"^Device Minor:\s+(\d+)\s*$", information or "", re.MULTILINE)
    return f"dev/nvidia{minor[1]}" if minor else None


def _by_numbers(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
