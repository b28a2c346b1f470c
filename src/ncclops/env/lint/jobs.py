"""What a script shows about its job: how many nodes it has, and what it uses."""

from __future__ import annotations

import re
from typing import Literal

# Features of ``Circumstances.uses``, by what a script writes.
_MARKS = {
    "fsdp2": r"--use[-_](?:torch|megatron)[-_]fsdp2?\b|fsdp_version[=: ]+2\b|fully_shard\b",
    "tensor-parallel": r"--tensor[-_]model[-_]parallel[-_]size[= ]+(?:[2-9]|1\d)",
    "ucc": r"--(?:distributed|dist)[-_]backend[= ]+ucc\b",
    "torchrun": r"\btorchrun\b|torch\.distributed\.(?:run|launch)\b",
    "ras-polling": r"\bncclras\b|\b28028\b",
    "rocm": r"(?i:rocm|librccl|\brccl)|\bRCCL_|\bHIP_[A-Z]|\bHSA_|\bROCR_VISIBLE_DEVICES\b"
    r"|\bPYTORCH_HIP_ALLOC_CONF\b|\bMI[23]\d\d[AX]\b|\bgfx9\d\w\b",
    "net-plugin": r"\bFI_PROVIDER\b|\bFI_EFA_|\bFI_CXI_|\bOFI_NCCL_|\baws-ofi|\bgIB\b|fastrak|tcpx"
    r"|\bcxi\b|libfabric",
}


def features(text: str) -> frozenset[str]:
    """Which features a script uses, by what it writes (see ``Circumstances.uses``)."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# "))
    return frozenset(name for name, mark in _MARKS.items() if re.search(mark, code))


def node_count(text: str) -> Literal["one", "many"] | None:
    """Whether a script asks its scheduler or launcher for one node or several.

    None also where it says both: then it depends on what is run.
    """
    counts = re.findall(
        r"^#SBATCH\s+(?:--nodes[= ]|-N[= ]?)(\d{1,9})"
        r"|^[^#\n]*?--(?:nnodes|num[-_](?:nodes|machines))[= ](\d{1,9})\b"
        r"|^[ \t]*#PBS .*select=(\d{1,9})|^#BSUB\s+-nnodes\s+(\d{1,9})",
        text,
        re.MULTILINE,
    )
    numbers = {int(number) for groups in counts for number in groups if number}
    if not numbers or (min(numbers) <= 1 < max(numbers)):
        return None
    return "many" if max(numbers) > 1 else "one"
