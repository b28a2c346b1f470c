"""The lines of the kernel log that may concern GPUs and their links, each with its age.

``/dev/kmsg`` of this machine; below another root, and where it is not ours to read, the files in
which the log is kept. Their stamps are seconds since boot, or a date.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

from ncclops.preflight.machine import files
from ncclops.preflight.readings import KernelLog, LogLine
from ncclops.record.regular_file import open_regular

_WANTED = re.compile(
    r"NVRM|nvidia|Nvidia|PCIe bandwidth|fallen off the bus|NVSwitch|SXid|mlx5_core|AER|\(Fatal\)"
    r"|EDAC|Memory failure|lockup|LOCKUP|blocked for more than|Machine Check|NETDEV WATCHDOG"
    r"|EXT4-fs|XFS|[Rr]emounting filesystem|I/O error| error, dev |md/raid|nvme|nf_conntrack"
    r"|nfs: server|lockd: server|Lustre.*: Connection |evicted by|LBUG|ceph: "
    r"|rcu: INFO|temperature (?:is )?above|table overflow|GPU reset executed|Hardware Error|BTRFS"
    r"|BUG|Oops: |general protection fault, |Unable to handle kernel|unregister_netdevice: "
    r"|Out of memory: |clocksource|DMAR: |DPC: |pciehp|PCIe link lost|D3cold|config space inacc"
    r"|bnxt_en|infiniband (?:efa|irdma|rdmap)|\b(?:efa|ena|mana) [0-9a-f]{4}:"
)
# What convicts GPUs and switches, and what takes that back: thousands of lines of other devices do
# not drive it out.
_FIRST = re.compile(r"Xid|RmInitAdapter|fallen off the bus|loading NVIDIA|GPU reset executed")
# What comes by the thousand where a link is bad: it does not drive out the others either.
_MANY = re.compile(
    r"[Cc]orrect(?:ed|able) error|severity=Correct|error status/mask|EDAC MC\d+: \d+ CE |DMAR: "
)
_KEPT = ("dev/kmsg", "var/log/kern.log", "var/log/syslog", "var/log/messages", "var/log/dmesg")
_MOST_BYTES = 8 << 20
_MOST_LINES = 2000
_MOST_CHARS = 400
_CLOCKS_S = 60.0  # how far two clocks that are right may be apart
_SINCE_BOOT = re.compile(r"\[\s*(\d+\.\d+)\]\s?")
_KMSG = re.compile(r"^\d+,\d+,(\d+),[^;]*;")
# What stands before the kernel's own words in a file, where its stamp has been read.
_BEFORE = re.compile(
    r"^(?:(?:\d{4}-\S+|[A-Z][a-z]{2} +\d+) (?:\S+ ){1,2}kernel: )?"
    r"(?:\[ *\d+\.\d+\] ?|\[[A-Z][a-z]{2} [^]]{16,24}\] ?)?"
)
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d) ")
_CTIME = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d) (\d{4})\]")


@dataclass(frozen=True)
class _Moment:
    """Now in seconds since the epoch, the machine's uptime, and the zone of its log's dates."""

    now: float
    uptime_s: float | None
    zone: tzinfo | None


def read_log(root: Path) -> KernelLog:
    """What there is of the log below ``root``."""
    moment = _Moment(time.time(), _number(files.read_text(root, "proc/uptime")), _zone(root))
    if root == Path("/") and (text := _kmsg()) is not None:
        return KernelLog(source="/dev/kmsg", lines=tuple(_lines(text, moment)))
    first = None
    for name in _KEPT:  # one may be there and empty, as after its rotation
        text = files.tail_text(root, name, _MOST_BYTES)
        if text is None:
            continue
        first = first or f"/{name}"
        if lines := tuple(_lines(text, moment)):
            return KernelLog(source=f"/{name}", lines=lines)
    return KernelLog(source=first)


def _kmsg() -> str | None:
    """All records that the kernel still has; each read gives one."""
    records = []
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while True:
            with suppress(BrokenPipeError):  # overwritten meanwhile: the next read goes on
                records.append(os.read(log, 16384).decode(errors="replace"))
    except BlockingIOError:
        pass
    except OSError:
        return None
    finally:
        os.close(log)
    return "".join(records)


def _lines(text: str, moment: _Moment) -> Iterator[LogLine]:
    kept = [line for line in text.splitlines() if _WANTED.search(line)]
    first = [n for n, line in enumerate(kept) if _FIRST.search(line)]
    many = [n for n, line in enumerate(kept) if _MANY.search(line)]
    rest = sorted({*range(len(kept))} - {*many})
    newest = {*first[-_MOST_LINES:], *many[-_MOST_LINES:], *rest[-_MOST_LINES:]}
    for line in (kept[number] for number in sorted(newest)):
        age = _age(line, moment)
        # What an earlier start of the machine has logged, this one may have mended.
        if age is None or moment.uptime_s is None or age <= moment.uptime_s + 1.0:
            words = _BEFORE.sub("", _KMSG.sub("", line, count=1), count=1)
            yield LogLine(words[:_MOST_CHARS], age)


def _age(line: str, moment: _Moment) -> float | None:
    """None where it is not known, as where the clocks of log and reader do not agree."""
    age, since_boot = None, None
    if match := _KMSG.match(line):
        since_boot = int(match[1]) / 1e6
    elif (stamp := _stamp(line, moment)) is not None:
        age = moment.now - stamp
    elif match := _SINCE_BOOT.search(line):
        since_boot = float(match[1])
    if since_boot is not None and moment.uptime_s is not None:
        age = moment.uptime_s - since_boot
    # In the future: a zone that is not the log's, or an uptime that is a container's (lxcfs).
    return None if age is None or age < -_CLOCKS_S else max(0.0, age)


def _stamp(line: str, moment: _Moment) -> float | None:
    """The date at the beginning of ``line``, in seconds since the epoch."""
    try:
        if match := _ISO.match(line):
            found = datetime.fromisoformat(f"{match[1]}T{match[2]}{match[3] or ''}")
            return (found if match[3] else found.replace(tzinfo=moment.zone)).timestamp()
        if match := _CTIME.match(line):
            return _date(f"{match[4]} {match[1]} {match[2]} {match[3]}", moment)
        if match := _SYSLOG.match(line):
            year, rest = datetime.fromtimestamp(moment.now).year, " ".join(match.groups())
            stamp = _date(f"{year} {rest}", moment)
            is_next = stamp > moment.now + timedelta(days=1).total_seconds()
            return _date(f"{year - 1} {rest}", moment) if is_next else stamp
    except ValueError:
        return None
    return None


def _date(text: str, moment: _Moment) -> float:
    found = datetime.strptime(text, "%Y %b %d %H:%M:%S")
    return found.replace(tzinfo=moment.zone).timestamp()


def _zone(root: Path) -> tzinfo | None:
    """The zone that dates of the log are in, where it may be another than this process's."""
    if root == Path("/"):
        return None
    try:
        with open_regular(files.below(root, "etc/localtime")) as file:
            return ZoneInfo.from_file(io.BytesIO(file.read(files.MOST_BYTES) or b""))
    except (OSError, ValueError):  # not there, or no zone
        return None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None
