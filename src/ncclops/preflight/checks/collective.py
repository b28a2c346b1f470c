"""Checks of a collective between the GPUs of a node, where one was asked for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import HOST, Rule, some
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Collective, Node

_RESULT = re.compile(r"\[(OK|INFO)\]\s+(.*)")


def all_reduce(check: Check, node: Node) -> Iterator[Finding]:
    """Whether it ends, with the right sums."""
    found = node.collective
    if found is None:
        return
    if found.unknown:
        yield check.unknown(HOST, found.unknown)
    elif (why := fault(found)) is not None:
        yield check.bad(HOST, why)
    else:
        yield check.ok(HOST, f"right sums over {found.gpus} GPUs")


def bandwidth(check: Check, node: Node) -> Iterator[Finding]:
    """Against what the table has for the model, and so many of it."""
    found = node.collective
    if found is None or not found.seconds:
        return
    reached = bus_bandwidth(found.bytes, found.seconds, found.gpus)
    names = {gpu.name or "?" for gpu in node.gpus}
    said = f"{reached:.0f} GB/s over {found.gpus} GPUs, at {found.bytes >> 20} MiB"
    (model, *others) = names
    wanted = None if others else figure(check.limits["boards"], model, found.gpus)
    if wanted is None:
        yield check.unknown(HOST, f"{said}; no figure for {found.gpus} of {some(sorted(names))}")
    elif reached < wanted * check.limit("fail_share"):
        yield check.bad(HOST, f"{said}, of {wanted:.0f}")
    elif reached < wanted * check.limit("warn_share"):
        yield check.warn(HOST, f"{said}, of {wanted:.0f}")
    else:
        yield check.ok(HOST, said)


def diagnostics(check: Check, node: Node) -> Iterator[Finding]:
    """What NCCL's own say: they inform, and end no job."""
    found = node.collective
    if found is None or found.unknown:
        return
    results = [match.groups() for line in found.diagnostics if (match := _RESULT.match(line))]
    grave = [text for tag, text in results if tag == "INFO"]
    paths = [text for text in grave if re.match(r"p2p: only \d+/\d+ ", text)]
    if paths:
        yield check.bad(HOST, some(grave))
    elif grave:
        yield check.warn(HOST, some(grave))
    elif results:
        yield check.ok(HOST, some([text for _, text in results]))
    else:
        yield check.unknown(HOST, "NCCL has printed none; versions before 2.31 have none")


def fault(found: Collective) -> str | None:
    """What was wrong with it; None where it ended with the right sums, or nothing is known."""
    if found.problem:
        return f"over {found.gpus} ranks: {found.problem}"
    return None if found.right else f"wrong sums over {found.gpus} ranks"


def bus_bandwidth(size: int, seconds: float, count: int) -> float:
    """GB/s on the links, as nccl-tests counts them: each byte crosses 2 (n - 1) / n times."""
    return size / seconds * 2 * (count - 1) / count / 1e9


def figure(boards: Any, model: str, count: int) -> float | None:
    """The figure that a table has for ``count`` GPUs of ``model``; None where it has none."""
    for pattern, figures in boards.items():
        if re.search(pattern, model) and str(count) in figures:
            return float(figures[str(count)])
    return None


RULES: Mapping[str, Rule] = {
    "gpu.all-reduce": all_reduce,
    "gpu.bandwidth": bandwidth,
    "gpu.nccl-diagnostics": diagnostics,
}
