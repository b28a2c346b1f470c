"""The check of what the driver has written into the kernel log about GPUs and switches. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
# Since then it is another start of the driver, or of one GPU. The second is NVSentinel's word
# (gpu-reset): where the driver does not say Xid 154, it says nothing of a reset.
_LOADED = re.compile(r"NVRM: loading NVIDIA UNIX")
_RESET = re.compile(r"GPU reset executed: (GPU-[0-9a-fA-F-]+)(?!.*success: false)")
# What the driver says of a GPU that it cannot use, without a number.
_WITHOUT_XID = re.compile(r"fallen off the bus|RmInitAdapter failed")
_PCI = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}")


@dataclass
class _Noted:
    """What a line says of a GPU or switch. ``is_mended``: it has been reset since."""

    what: str
    age_s: float | None
    is_grave: bool = True
    is_mended: bool = False


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
    newest_s, is_fine = check.limit("hours") * 3600, True
    for place, listed in _noted(check, node).items():
        seen, old = list[str](), list[str]()
        for each in listed:
            since = "" if not each.is_mended else ", before it was reset"
            if each.age_s is None:
                old.append(f"{each.what}, of unknown age")
            elif each.age_s <= newest_s:
                is_own = each.is_grave and not each.is_mended and not may_be_of_others(node, place)
                (seen if is_own else old).append(
                    f"{each.what}, {each.age_s / 60:.0f} min ago{since}"
                )
        is_fine = is_fine and not seen and not old
        if seen:
            yield check.bad(place, some(list(dict.fromkeys(seen))), _helps(check, seen))
        elif old:
            is_over = all(each.is_mended for each in listed)
            what = "over" if is_over else _helps(check, old)
            yield check.warn(place, some(list(dict.fromkeys(old))), what)
    if has_gpus and is_fine:
        yield check.ok(HOST, f"none in {node.log.source}")


def _noted(check: Check, node: Node) -> dict[str, list[_Noted]]:
    """What the log says of each GPU and switch, the oldest first."""
    codes, mild, reset = map(check.numbers, ("codes", "mild", "reset"))
    noted, asked = defaultdict[str, list[_Noted]](list), dict[str, _Noted]()
    # Where NVML says what the driver wants now, that counts.
    wanted_now = {name_of(gpu): gpu.recovery_action for gpu in node.gpus}
    silent = {place for place, action in wanted_now.items() if action is None}

    def is_told(place: str) -> bool:
        return place in wanted_now and place not in silent

    def mend(place: str, names: Collection[str] = ()) -> None:
        for each in noted[place]:
            each.is_mended |= not names or each.what in names

    mended = defaultdict[str, set[str]](set)
    for line in node.log.lines:
        match, switch = _XID.search(line.text), _FATAL_SXID.search(line.text)
        if _LOADED.search(line.text):
            for place in list(noted):
                mend(place)
            asked.clear()
        elif told := _RESET.search(line.text):
            mend(next((name_of(gpu) for gpu in node.gpus if gpu.uuid == told[1]), told[1]))
        elif match and (asks := _ASKS.search(line.text)):
            place = by_pci(node, match[1])
            if not int(asks[1], 16):
                mend(place)
                asked.pop(place, None)
                continue
            asked[place] = _Noted(f"Xid 154, {asks[2]}", line.age_s)
            if wanted_now.get(place) == 0:
                # It wants nothing any more: somebody has reset it since.
                mended[place].update(each.what for each in noted[place])
        elif match and (code := int(match[2])) in codes | mild:
            place, nonfatal = by_pci(node, match[1]), bool(_NONFATAL.search(line.text))
            grave = not nonfatal and code in codes - (reset if is_told(place) else frozenset())
            noted[place].append(
                _Noted(f"Xid {code}{', nonfatal' * nonfatal}", line.age_s, is_grave=grave)
            )
        elif switch:
            said = _Noted(f"SXid {switch[2]}, fatal", line.age_s)
            noted[f"NVSwitch {switch[1].lower()}"].append(said)
        elif match is None and (found := _WITHOUT_XID.search(line.text)):
            address = _PCI.search(line.text)
            noted[by_pci(node, address[0] if address else "")].append(_Noted(found[0], line.age_s))
    for place, names in mended.items():
        mend(place, names)
    for place, wants in asked.items():
        if not is_told(place):
            noted[place].append(wants)
    return noted


def _helps(check: Check, said: Sequence[str]) -> str:
    """Whose remedy is the gravest of what was ``said``."""
    for what in check.remedies:
        patterns = check.limits.get(what, ())
        if any(re.match(rf"(?:{'|'.join(patterns)})\b", each) for each in said if patterns):
            return what
    return ""


RULES: dict[str, Rule] = {"gpu.xid": xid}
