"""What is read of RDMA devices: ports, addresses, counters, the PCI function and its interface."""

from __future__ import annotations

from pathlib import Path

from ncclops.preflight.machine import files
from ncclops.preflight.readings import Files

# A port may have 256 addresses, nearly all empty; NCCL takes one of the first, or the one named.
_USUAL_GIDS = 16


def devices(root: Path) -> list[str]:
    """The RDMA devices below ``root``, by name."""
    return files.names(root, "sys/class/infiniband")


def read_device(root: Path, device: str, gid_index: int | None = None) -> Files:
    """All of ``device`` but its counters."""
    top = f"sys/class/infiniband/{glob_escape(device)}"
    indices = [*range(_USUAL_GIDS)]
    if gid_index is not None and gid_index not in indices:
        indices.append(gid_index)
    found = files.read(
        root,
        [
            *(f"{top}/{name}" for name in ("node_type", "hca_type", "board_id", "fw_ver")),
            *(
                f"{top}/ports/*/{name}"
                for name in ("state", "phys_state", "rate", "link_layer", "pkeys/?")
            ),
            *(
                f"{top}/device/{name}"
                for name in ("numa_node", "vendor", "device", "vpd", "current_link_width",
                             "max_link_width", "current_link_speed", "max_link_speed")
            ),
            # What the slot can do, by the bridge above.
            f"{top}/device/../max_link_width",
            f"{top}/device/../max_link_speed",
            *(
                f"{top}/device/net/*/{name}"
                for name in ("operstate", "carrier", "carrier_changes", "mtu", "flags")
            ),
            f"@{top}/device/net/*/master",
            f"{top}/device/net/*/master/bonding/mode",
            f"{top}/device/net/*/master/lower_*/bonding_slave/mii_status",
            f"{top}/ports/*/gid_attrs/types",
            f"@{top}/device",
            f"@{top}/device/driver",
            f"@{top}/device/physfn",
            "sys/class/infiniband_verbs/*/ibdev",
            "sys/class/infiniband_mad/*/ibdev",
            "sys/class/infiniband_mad/*/port",
            "dev/infiniband",
            "dev/infiniband/*",
        ],
    )  # fmt: skip
    for index in indices:
        for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            found |= files.read(root, [f"{top}/ports/*/{part}/{index}"])
    return Files(found)


def read_counters(root: Path, device: str) -> Files:
    """The counters of ``device``, and how often its interfaces have lost their carrier.

    On functions that may not read them each read is a line in the kernel log (gpud#1164), so a
    device that is left out of the check is not asked.
    """
    top = f"sys/class/infiniband/{glob_escape(device)}"
    return Files(
        files.read(
            root,
            [
                f"{top}/ports/*/counters/*",
                f"{top}/ports/*/hw_counters/*",
                f"{top}/hw_counters/*",
                f"{top}/device/net/*/carrier_changes",
            ],
        )
    )


def glob_escape(name: str) -> str:
    """``name`` as a pattern that matches it alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
