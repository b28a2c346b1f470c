"""The catalogue of variables: who reads each, what it takes, when, and what depends on it.

The facts are data, ``data/catalogue.jsonl``, one object a line, loaded at the first use. Where a
field is left out of a line, it is not known or does not apply. ``A_{B,C}_D`` as a name is two
variables, and ``{}`` in another field is what each has there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from ncclops.versions import release

Status = Literal["active", "plugin", "deprecated", "removed", "unread"]

# Components that are libnccl itself: their versions are NCCL's, and an audit can check them.
LIBNCCL = ("nccl-core", "nccl-net-ib", "nccl-net-socket", "nccl-gin", "nccl-ras")
# Components whose versions are torch's.
TORCH = (
    "allocator",
    "c10d",
    "c10d-nccl",
    "elastic",
    "flight-recorder",
    "gloo",
    "inductor",
    "pytorch",
    "pytorch-logging",
    "symm-mem",
)

READERS = {
    "nccl-core": "NCCL",
    "nccl-net-ib": "NCCL's InfiniBand and RoCE transport",
    "nccl-net-socket": "NCCL's TCP transport",
    "nccl-gin": "NCCL's GPU-initiated networking",
    "nccl-ras": "NCCL's RAS service",
    "nccl-plugin-aws-ofi": "the AWS OFI network plugin",
    "nccl-plugin-gcp": "Google's network and tuner plugins",
    "nccl-plugin-rdma-sharp": "the HPC-X (RDMA and SHARP) plugin",
    "nccl-plugin-inspector": "NCCL's inspector plugin",
    "nccl-plugin-example": "NCCL's example plugins",
    "libfabric": "libfabric",
    "ucx": "UCX",
    "nccl-tests": "nccl-tests",
    "c10d": "torch.distributed",
    "c10d-nccl": "torch's NCCL process group",
    "flight-recorder": "torch's flight recorder",
    "elastic": "torchrun and the elastic agent, or scripts under it",
    "gloo": "Gloo",
    "inductor": "torch.compile (Inductor)",
    "allocator": "torch's caching allocator",
    "pytorch": "PyTorch",
    "pytorch-logging": "PyTorch's logging",
    "symm-mem": "torch's symmetric memory",
    "transformer-engine": "Transformer Engine",
    "cuda": "CUDA",
    "loader": "the dynamic loader",
    "launcher": "launchers and schedulers",
    "build": "builds and scripts, not NCCL",
    "nothing": "nothing",
}

# When a value is taken, and what that means for a restart inside the process.
READ_WHEN = {
    "cached": (
        "once per process, at first use",
        "Cached: a change counts in a new process only, or from NCCL 2.29 on with"
        " NCCL_NO_CACHE naming it.",
    ),
    "static": (
        "once per process",
        "Fixed for the process, and NCCL_NO_CACHE does not help: a change needs a new one.",
    ),
    "communicator": (
        "whenever a communicator is made",
        "Read anew when communicators are made again, so a restart picks a change up.",
    ),
    "log": ("once, at the first log line", "Fixed at the first log line of the process."),
    "group": (
        "when a process group is made",
        "Read anew for the groups that a restart makes.",
    ),
    "never": ("never", ""),
}

RANKS = {
    "equal": "must be equal on all ranks",
    "better equal": "should be equal on all ranks",
    "free": "may differ between ranks",
    "per host": "differs from host to host",
    "per rank": "differs from rank to rank",
    "": "",
}


class Variable(msgspec.Struct, frozen=True):
    """One variable.

    ``check`` says what a program can test a value against (see ``ncclops.env.values``);
    ``accepts`` says it for people. ``since``, ``deprecated`` and ``removed`` are versions of
    the component that reads it. ``libnccl`` is the first and last release in whose binary the
    name was found. ``one_node`` are patterns of values that only a job of one node wants,
    ``many_nodes`` patterns of words of which a list is of no use within one.
    ``nccl2`` says whether torch's second NCCL engine (2.14 and later) reads it, None where that
    does not apply.
    """

    name: str
    component: str
    kind: str
    accepts: str
    default: str
    status: Status
    read: str
    ranks: str
    summary: str
    source: str
    unit: str = ""
    check: dict[str, Any] = {}
    since: str | None = None
    deprecated: str | None = None
    removed: str | None = None
    replaced_by: str | None = None
    debug: bool = False
    multi_host: bool = False
    one_node: tuple[str, ...] = ()
    many_nodes: tuple[str, ...] = ()
    single_node: Literal["low", "medium", "high"] | None = None
    risk: str | None = None
    restart: str | None = None
    nccl2: bool | None = None
    documented: bool | None = None
    libnccl: tuple[str, str] | None = None

    @property
    def reader(self) -> str:
        """Who reads it, for people."""
        return READERS.get(self.component, self.component)

    @property
    def read_when(self) -> str:
        """When its value is taken, for people."""
        return READ_WHEN[self.read][0] if self.read in READ_WHEN else self.read

    @property
    def restart_note(self) -> str:
        """What a restart inside the process has to know about it, empty if nothing."""
        return self.restart or READ_WHEN.get(self.read, ("", ""))[1]

    def read_in(self, *, torch: str | None, nccl: str | None) -> bool | None:
        """Whether the installed version reads it; None when that version is not known."""
        if self.status == "unread":
            return False
        installed = nccl if self.component in LIBNCCL else None
        if self.component in TORCH:
            installed = torch
        if installed is None:
            return False if self.status == "removed" and self.component in LIBNCCL else None
        have = release(installed)
        if self.removed and have >= release(self.removed):
            return False
        first = (self.since or "").removeprefix("<=")
        if not first[:1].isdigit() or self.since != first:
            return None if self.removed is None else True
        return have >= release(first)


@cache
def catalogue() -> Mapping[str, Variable]:
    """All variables by name."""
    data = resources.files("ncclops.env").joinpath("data/catalogue.jsonl").read_bytes()
    lines = msgspec.json.Decoder(Variable).decode_lines(data)
    return MappingProxyType({each.name: each for line in lines for each in _each(line)})


def _each(line: Variable) -> Iterator[Variable]:
    """The variables that a line of the data stands for."""
    before, _, rest = line.name.partition("{")
    if not rest:
        yield line
        return
    parts, _, after = rest.partition("}")
    fields = msgspec.structs.asdict(line)
    open_fields = {k: v for k, v in fields.items() if isinstance(v, str) and "{}" in v}
    for part in parts.split(","):
        filled = {key: value.replace("{}", part) for key, value in open_fields.items()}
        yield msgspec.structs.replace(line, name=f"{before}{part}{after}", **filled)


@cache
def names_of_today() -> Mapping[str, str]:
    """Old names of one variable, each with its name of today: its reader takes them for that.

    Not those whose successor takes other values.
    """
    names = {}
    for name, variable in catalogue().items():
        today = catalogue().get(variable.replaced_by or "")
        if variable.status == "deprecated" and today and today.check == variable.check:
            names[name] = today.name
    return MappingProxyType(names)


# Names that start so are settings of the software the catalogue covers.
_PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "TORCH_DISTRIBUTED_",
    "TORCH_DIST_",
    "TORCH_GLOO_",
    "TORCHELASTIC_",
    "TORCH_ELASTIC_",
    "GLOO_",
    "OFI_NCCL_",
    "FI_CXI_",
    "FI_EFA_",
    "FI_OFI_RXR_",
    "UCX_",
)


# What fingers make of NCCL; RCCL, HCCL, MCCL and others are names of their own.
MISSPELT_PREFIXES = {
    "NCLL_": "NCCL_",
    "NCC_": "NCCL_",
    "NCL_": "NCCL_",
    "NNCL_": "NCCL_",
    "NCCCL_": "NCCL_",
    "NCCLL_": "NCCL_",
    "NCLC_": "NCCL_",
    "TORCH_NCLL_": "TORCH_NCCL_",
    "TORCH_NCC_": "TORCH_NCCL_",
}


def is_covered(name: str) -> bool:
    """Whether an unknown ``name`` is suspicious: it looks like one the catalogue would have."""
    return name.startswith(_PREFIXES)


# Families of plugins and tools whose names the catalogue does not claim to have all.
_FAMILIES = (
    "NCCL_EP_",
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_INSPECTOR_",
    "NCCL_SHARP_",
    "NCCL_TEST",
    "NCCL_UCX_",
    "OFI_NCCL_",
    "UCX_GDR_COPY_",
    "UCX_GGA_",
    "UCX_KNEM_",
    "UCX_ROCM_",
    "UCX_STATS_",
    "UCX_XPMEM_",
    "UCX_ZE_",
)


# Components that carry data between nodes, or are loaded for that.
_NETWORKS = (
    "libfabric",
    "nccl-net-ib",
    "nccl-net-socket",
    "nccl-plugin-aws-ofi",
    "nccl-plugin-gcp",
    "nccl-plugin-rdma-sharp",
    "sharp",
    "ucx",
)
# Their names, for variables that the catalogue does not have. ``FI_`` alone may be anybody's.
_NETWORK_FAMILIES = (
    "FI_CXI_",
    "FI_EFA_",
    "FI_HMEM_",
    "FI_MR_",
    "FI_OFI_",
    "FI_OPX_",
    "FI_PSM2_",
    "FI_PSM3_",
    "FI_TCP_",
    "FI_VERBS_",
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_IB_",
    "NCCL_SHARP_",
    "NCCL_UCX_",
    "OFI_NCCL_",
    "SHARP_COLL_",
    "UCX_",
)


def is_between_nodes(name: str, value: str) -> bool:
    """Whether ``name`` or its ``value`` is of networks between nodes, of no use within one."""
    variable = catalogue().get(name)
    if variable is None:
        return name.startswith(_NETWORK_FAMILIES)
    if variable.multi_host or variable.component in _NETWORKS:
        return True
    words = value.strip().lower().split(",")
    return all(any(fnmatchcase(word, p) for p in variable.many_nodes) for word in words)


def is_within_node(name: str, value: str) -> bool:
    """Whether only a job of one node wants ``name`` to be ``value``, in upper or lower case."""
    variable = catalogue().get(name)
    patterns = () if variable is None else variable.one_node
    return any(fnmatchcase(value.strip().lower(), pattern) for pattern in patterns)


def is_of_plugin(name: str) -> bool:
    """Whether ``name`` belongs to a plugin or tool with more names than the catalogue has."""
    return name.startswith(_FAMILIES)


# What the hundreds of variables of a library begin with: none of them is meant by another name.
_OF_LIBRARIES = ("UCX_", "FI_")


@cache
def _names_of(family: str) -> tuple[str, ...]:
    if family:
        return tuple(name for name in catalogue() if name.startswith(family))
    return tuple(name for name in catalogue() if not name.startswith(_OF_LIBRARIES))


@lru_cache(maxsize=10_000)
def nearest_names(name: str, count: int = 3) -> tuple[str, ...]:
    """The catalogue's names that ``name`` may have been meant to be, the closest one first.

    A missing or doubled prefix (``BLOCKING_WAIT``, ``TORCH_NCCL_IB_HCA``) counts as close.
    """
    upper = name.upper()
    known = catalogue()
    exact = [
        candidate
        for prefix in ("TORCH_", "NCCL_", "TORCH_NCCL_")
        for candidate in (prefix + upper, upper.removeprefix(prefix))
        if candidate in known and candidate != name
    ]
    if upper in known and upper != name:
        exact.insert(0, upper)
    cutoff = 0.92 if is_of_plugin(upper) else 0.8
    family = next((start for start in _OF_LIBRARIES if upper.startswith(start)), "")
    close = difflib.get_close_matches(upper, _names_of(family), n=count, cutoff=cutoff)
    readable = [other for other in [*exact, *close] if known[other].status != "unread"]
    return tuple(dict.fromkeys(readable))[:count]
