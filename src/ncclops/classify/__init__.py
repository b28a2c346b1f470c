"""Failure classification: what failed, which line proves it, whether it may be retried.

    from ncclops.classify import classify

    report = classify("runs/20260101-120000-abcdef")
    print(report.verdict.class_, report.verdict.rank, report.verdict.eligible)

``classify`` reads a path or lines, ``classify_paths`` several paths as one job, ``Scanner`` takes
live output; all end in a ``Report``. The retry decision is ``ncclops.classify.policy``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclops.classify.inputs import classify, classify_bytes, classify_paths
    from ncclops.classify.loader import SignatureSet, load_signatures
    from ncclops.classify.model import Classification, Evidence, Report, Signature
    from ncclops.classify.scanner import Scanner

    Verdict = Classification  # its name until 0.1: `launch` has a verdict of its own

__all__ = [
    "Classification",
    "Evidence",
    "Report",
    "Scanner",
    "Signature",
    "SignatureSet",
    "Verdict",
    "classify",
    "classify_bytes",
    "classify_paths",
    "load_signatures",
]

_MODULES = {
    "inputs": ("classify", "classify_bytes", "classify_paths"),
    "loader": ("SignatureSet", "load_signatures"),
    "model": ("Classification", "Evidence", "Report", "Signature"),
    "scanner": ("Scanner",),
}


def __getattr__(name: str) -> Any:
    # A worker that asks ``in_place`` between a fault and its restart needs none of these.
    asked = "Classification" if name == "Verdict" else name
    for module, names in _MODULES.items():
        if asked in names:
            value = getattr(import_module(f"{__name__}.{module}"), asked)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
