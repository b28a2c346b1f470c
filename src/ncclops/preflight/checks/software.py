"""Checks of what is installed: driver against CUDA, and known-bad versions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from ncclops.advisories import Case, advisories, concerning
from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import HOST, Rule
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Node
from ncclops.versions import release


def cuda(check: Check, node: Node) -> Iterator[Finding]:
    """The driver's CUDA against the one that torch was built for, by their major versions."""
    if not node.gpus or node.torch_cuda is None:
        return
    if node.driver.cuda is None:
        yield check.unknown(HOST, f"torch is built for CUDA {node.torch_cuda}, NVML does not say")
        return
    own = f"{node.driver.cuda // 1000}.{node.driver.cuda % 1000 // 10}"
    said = f"driver {node.driver.version or '?'} has CUDA {own}, torch CUDA {node.torch_cuda}"
    # Within a major version newer libraries run on an older driver.
    if release(own)[:1] >= release(node.torch_cuda)[:1]:
        yield check.ok(HOST, said)
    elif any(node.files.matching(r"usr/local/cuda[^/]*/compat/libcuda\.so.*")):
        yield check.warn(HOST, f"{said}; a compatibility package is here")
    else:
        yield check.bad(HOST, said)


def known_issues(check: Check, node: Node) -> Iterator[Finding]:
    """Each advisory that concerns this node for certain, with its own remedy."""
    if node.software is None or not node.gpus:
        return
    software = replace(
        node.software,
        gpus=tuple(gpu.name or "GPU" for gpu in node.gpus),
        driver=node.driver.version,
    )
    found = concerning(advisories(), Case(software=software, environ=node.environ))
    sure = [each.advisory for each in found if each.state == "concerns"]
    for entry in sure:
        said = check.bad(HOST, f"{entry.title} ({entry.id})")
        yield msgspec.structs.replace(said, remedy=entry.remedy)
    if not sure:
        yield check.ok(HOST, "none is known for certain (`ncclops advise` shows what depends)")


RULES: Mapping[str, Rule] = {"software.cuda": cuda, "software.advisories": known_issues}
