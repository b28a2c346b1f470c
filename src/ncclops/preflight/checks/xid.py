"""The check of what the driver has written into the kernel log about GPUs and switches. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.gpu_facts import (
    by_pci,
    loaded_version,
    may_be_of_others,
    name_of,
)
from ncclops.preflight.checks.look import HOST, Rule, in_container, some
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Node

# With MIG the instance stands behind the address: (PCI:0000:19:00 GPU-I:05).
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")
# NVLink errors say it with their own word: Xid 144 to 150.
_NONFATAL = re.compile(r"Xid \([^)]*\): 1\d\d, .*\bNonfatal\b")
_FATAL_SXID = re.compile(r"SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+), Fatal\b")
# What the driver wants from now on: the number of nvmlDeviceGpuRecoveryAction_t, and its name.
_ASKS = re.compile(r"\): 154, GPU recovery action changed from .* to (0x[0-9a-fA-F]+) \(([^)]*)\)")
# What the driver says of a GPU that it cannot use, without a number.
_WITHOUT_XID = re.compile(r"fallen off the bus|RmInitAdapter failed")
_PCI = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}")


def xid(check: Check, node: Node) -> Iterator[Finding]:
    """Those of the hardware; what an application has done to itself is not the node's."""
    has_gpus = bool(node.gpus) or node.driver.count is not None
    # Where NVML does not start, the log may say why; a container's job may have no GPU at all.
    if not has_gpus and (in_container(node.files) or loaded_version(node) is None):
        return
    if node.log.source is None:
        if has_gpus:
            yield check.unknown(HOST, "the kernel log cannot be read")
        return
    codes, mild, reset = map(check.numbers, ("codes", "mild", "reset"))
    newest_s = check.limit("hours") * 3600
    seen, old = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    asked: dict[str, tuple[str, float | None]] = {}
    # Where NVML says what the driver wants now, that counts.
    known = {name_of(gpu) for gpu in node.gpus if gpu.recovery_action is not None}

    def note(place: str, what: str, age_s: float | None, *, grave: bool = True) -> None:
        if age_s is None:
            old[place].append(f"{what}, of unknown age")
        elif age_s <= newest_s:
            is_own = grave and not may_be_of_others(node, place)
            (seen if is_own else old)[place].append(f"{what}, {age_s / 60:.0f} min ago")

    for line in node.log.lines:
        match, switch = _XID.search(line.text), _FATAL_SXID.search(line.text)
        if match and (asks := _ASKS.search(line.text)):
            wants = f"Xid 154, {asks[2]}" if int(asks[1], 16) else ""
            asked[by_pci(node, match[1])] = wants, line.age_s
        elif match and (code := int(match[2])) in codes | mild:
            place, nonfatal = by_pci(node, match[1]), bool(_NONFATAL.search(line.text))
            grave = not nonfatal and code in codes - (reset if place in known else frozenset())
            note(place, f"Xid {code}{', nonfatal' * nonfatal}", line.age_s, grave=grave)
        elif switch:
            note(f"NVSwitch {switch[1].lower()}", f"SXid {switch[2]}, fatal", line.age_s)
        elif match is None and (told := _WITHOUT_XID.search(line.text)):
            address = _PCI.search(line.text)
            note(by_pci(node, address[0] if address else ""), told[0], line.age_s)
    for place, (wants, age_s) in asked.items():
        if wants and place not in known:
            note(place, wants, age_s)
    for place, said in seen.items():
        yield check.bad(place, some(list(dict.fromkeys(said))), _helps(check, said))
    for place, said in old.items():
        if place not in seen:
            yield check.warn(place, some(list(dict.fromkeys(said))), _helps(check, said))
    if has_gpus and not seen and not old:
        yield check.ok(HOST, f"none in {node.log.source}")


def _helps(check: Check, said: Sequence[str]) -> str:
    """Whose remedy is the gravest of what was ``said``."""
    for what in check.remedies:
        if any(re.match(rf"(?:{'|'.join(check.limits[what])})\b", each) for each in said):
            return what
    return ""


RULES: dict[str, Rule] = {"gpu.xid": xid}
