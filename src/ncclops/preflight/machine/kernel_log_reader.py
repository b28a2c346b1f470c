"""The lines of the kernel log that may concern GPUs and their links, each with its age.

``/dev/kmsg`` of this machine; below another root, and where it is not ours to read, the files in
which the log is kept. Their stamps are seconds since boot, or a date.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from ncclops.preflight.machine import files
from ncclops.preflight.readings import KernelLog, LogLine

_WANTED = re.compile(r"NVRM|nvidia|Nvidia|PCIe bandwidth|fallen off the bus|NVSwitch|SXid")
_KEPT = ("dev/kmsg", "var/log/kern.log", "var/log/syslog", "var/log/messages", "var/log/dmesg")
_MOST_BYTES = 8 << 20
_MOST_LINES = 2000
_MOST_CHARS = 400
_SINCE_BOOT = re.compile(r"\[\s*(\d+\.\d+)\]\s?")
_KMSG = re.compile(r"\d+,\d+,(\d+),[^;]*;")
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d) ")
_CTIME = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d) (\d{4})\]")


def read_log(root: Path) -> KernelLog:
    """What there is of the log below ``root``."""
    uptime = _number(files.read_text(root, "proc/uptime"))
    now = time.time()
    if root == Path("/") and (text := _kmsg()) is not None:
        return KernelLog(source="/dev/kmsg", lines=tuple(_lines(text, uptime, now)))
    first = None
    for name in _KEPT:  # one may be there and empty, as after its rotation
        text = files.tail_text(root, name, _MOST_BYTES)
        if text is None:
            continue
        first = first or f"/{name}"
        if lines := tuple(_lines(text, uptime, now)):
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


def _lines(text: str, uptime: float | None, now: float) -> Iterator[LogLine]:
    kept = [line for line in text.splitlines() if _WANTED.search(line)]
    boot = None if uptime is None else now - uptime
    for line in kept[-_MOST_LINES:]:
        age = _age(line, uptime, now)
        # What an earlier start of the machine has logged, this one may have mended.
        if age is None or boot is None or now - age >= boot - 1.0:
            yield LogLine(line[:_MOST_CHARS], age)


def _age(line: str, uptime: float | None, now: float) -> float | None:
    since_boot = None
    if match := _KMSG.match(line):
        since_boot = int(match[1]) / 1e6
    elif stamp := _stamp(line, now):
        return max(0.0, now - stamp)
    elif match := _SINCE_BOOT.search(line):
        since_boot = float(match[1])
    if since_boot is None or uptime is None:
        return None
    return max(0.0, uptime - since_boot)


def _stamp(line: str, now: float) -> float | None:
    """The date at the beginning of ``line``, in seconds since the epoch."""
    try:
        if match := _ISO.match(line):
            return datetime.fromisoformat(f"{match[1]}T{match[2]}{match[3] or ''}").timestamp()
        if match := _CTIME.match(line):
            text = f"{match[4]} {match[1]} {match[2]} {match[3]}"
            return datetime.strptime(text, "%Y %b %d %H:%M:%S").timestamp()
        if match := _SYSLOG.match(line):
            year = datetime.fromtimestamp(now).year
            text = f"{year} {match[1]} {match[2]} {match[3]}"
            found = datetime.strptime(text, "%Y %b %d %H:%M:%S")
            if found.timestamp() > now + timedelta(days=1).total_seconds():
                found = found.replace(year=year - 1)
            return found.timestamp()
    except ValueError:
        return None
    return None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None
