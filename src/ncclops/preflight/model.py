"""What preflight says: findings, and the report of one node. Values alone."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from ncclops import host_name
from ncclops.plain_text import plain_line

SCHEMA = "ncclops.preflight-node/1"


class Status(StrEnum):
    """What a check came to, the harmless first."""

    OK = "OK"
    CANNOT_TELL = "CANNOT-TELL"
    WARN = "WARN"
    FAIL = "FAIL"


_ORDER = tuple(Status)


def worst(statuses: Iterable[Status]) -> Status:
    """The gravest of ``statuses``; OK where there are none."""
    return max(statuses, key=_ORDER.index, default=Status.OK)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check on one subject.

    ``check`` is its id in the catalogue, ``subject`` what it was about ("GPU 3", "mlx5_1 port 1",
    "host"), ``read`` what was read there, or why it could not be, ``wanted`` what a healthy node
    shows, ``remedy`` what to do; empty where all is well.
    """

    check: str
    status: Status
    subject: str
    read: str
    wanted: str
    remedy: str = ""

    def __post_init__(self) -> None:
        # Readings may be a file or a name of the machine, or come from another host.
        for name, most_chars in (("subject", 200), ("read", 2000)):
            line = plain_line(getattr(self, name), most_chars)
            msgspec.structs.force_setattr(self, name, line)

    def to_json(self) -> dict[str, Any]:
        """As in the documents of ``ncclops preflight``."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


_MOST_RDMA = 64  # ports of a host: all others are told of them


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What hosts of one ``make`` (product, processor, model of GPUs) have alike.

    ``gpus`` as PCI shows them, ``gpu_mib`` the least memory of one, ``ports`` are the active RDMA
    ports, ``driver`` and ``nccl`` versions. 0 and empty texts: not known. ``rdma`` is what each
    host has to have for itself: addresses of its active RoCE ports and GUIDs of InfiniBand's.
    """

    make: str = ""
    memory_mib: int = 0
    gpus: int = 0
    gpu_mib: int = 0
    ports: int = 0
    driver: str = ""
    nccl: str = ""
    rdma: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("make", "driver", "nccl"):
            msgspec.structs.force_setattr(self, name, plain_line(getattr(self, name), 200))
        known = tuple(plain_line(each, 40) for each in self.rdma[:_MOST_RDMA])
        msgspec.structs.force_setattr(self, "rdma", known)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings on one node, and what it has in common with others of its make.

    ``time`` in seconds since the epoch; ``seconds`` it took.
    """

    host: str
    time: float
    findings: tuple[Finding, ...]
    boot_id: str | None = None
    seconds: float | None = None
    traits: Traits | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "host", host_name.clean(self.host))

    @property
    def status(self) -> Status:
        """The gravest status of its findings."""
        return worst(finding.status for finding in self.findings)

    def of(self, *statuses: Status) -> list[Finding]:
        """The findings with one of ``statuses``, in their order."""
        return [finding for finding in self.findings if finding.status in statuses]

    def named(self, host: str, seconds: float) -> NodeReport:
        """The same, by what a scheduler calls the host, and how long it took."""
        return msgspec.structs.replace(self, host=host, seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.preflight-node``."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": SCHEMA, "status": str(self.status), **built}

    @classmethod
    def from_json(cls, document: Any) -> NodeReport:
        """What ``to_json`` has made. Raises ``ValueError`` for anything else.

        Fields that a later version has added are passed over.
        """
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"this is no document of {SCHEMA}")
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{SCHEMA}: {error}") from None
